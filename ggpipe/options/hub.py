"""Models that are named by their repository on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass

from ggpipe.errors import Setting, SettingError, Wording


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """Models on the Hub, in llama.cpp's notation: `user/repo[:quant]`. Raises SettingError for another notation."""

    repo: str | None = None
    file: str | None = None
    """A file of the repository, instead of the one that has the quantization."""
    draft_repos: tuple[str, ...] = ()
    token: str | None = None
    """None: HF_TOKEN, or the one that `hf auth login` has saved."""
    offline: bool = False
    """Use only models in the cache."""

    def __post_init__(self) -> None:
        if self.file is not None and self.repo is None:
            raise SettingError("hf_file", "needs a repository", Wording("name it with ", Setting("hf_repo")))
        for name, text in (("hf_repo", self.repo), *(("draft.hf_repo", text) for text in self.draft_repos)):
            if text is not None and not _is_repo(text):
                raise SettingError(name, f"must be user/repo or user/repo:quant, got {text}")

    @property
    def is_given(self) -> bool:
        """Whether any model is on the Hub."""
        return self.repo is not None or bool(self.draft_repos)


def _is_repo(text: str) -> bool:
    repo, colon, quant = text.partition(":")
    return all(repo.split("/")) and repo.count("/") == 1 and bool(quant) == bool(colon)
