"""Which JSON schemas ggpipe follows, and how well; run it as `scripts/bench/check_schemas`.

A schema is right if all its valid instances fit the grammar that ggpipe makes of it, and no invalid one does. Instances
are written as Python's `json.dumps` writes them; with "reordered", also with their properties in the schema's order. An
invalid instance that fits is an error, except with `oneOf`, which counts as `anyOf`. Without arguments, the schemas are
our own sample (`schemas.jsonl`): tools, Kubernetes, OpenAPI and configuration files.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ggpipe.llama.guided_grammar import GuidanceVocab
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar.check import Constraint, check

SAMPLE = Path(__file__).with_name("schemas.jsonl")
"""Our own schemas."""
_END = 256


class Bytes:
    """A vocabulary of bytes."""

    n_tokens = _END + 1
    end_tokens = (_END,)
    special_tokens: Mapping[str, int] = {"<end>": _END}

    def text(self, token: int) -> str:
        """The name of a token."""
        return "<end>" if token == _END else ""

    def pieces(self) -> list[bytes]:
        """The text of every token."""
        return [bytes((byte,)) for byte in range(_END)] + [b""]


def cases(path: Path) -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
    """Names, schemas and instances of a file, with whether they are valid: our sample's form, that of the official test
    suite, or MaskBench's."""
    text = path.read_text()
    found = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or "schema" not in one:
            continue
        instances = [(test["data"], test["valid"]) for test in one.get("tests", ())]
        instances += [(instance, True) for instance in one.get("valid", ())]
        instances += [(instance, False) for instance in one.get("invalid", ())]
        yield str(one.get("name", one.get("description", path.name))), one["schema"], instances


def reordered(value: Any, schema: Any, root: Any, depth: int = 0) -> Any:
    """An instance with its properties in the order of the schema, as far as that is easily found."""
    while isinstance(schema, dict) and str(schema.get("$ref", "")).startswith("#/") and depth < 20:
        found = root
        for part in schema["$ref"].split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, dict) else {}
        schema, depth = found, depth + 1
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [reordered(item, schema.get("items"), root, depth) for item in value]
    if not isinstance(value, dict):
        return value
    own: dict[str, Any] = found if isinstance(found := schema.get("properties"), dict) else {}
    names = [*(name for name in own if name in value), *(name for name in value if name not in own)]
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    names.sort(key=lambda name: -1 if name in own else ([*required, name].index(name)))
    more = schema.get("additionalProperties")
    return {name: reordered(value[name], own.get(name, more), root, depth) for name in names}


class Counts(collections.Counter[str]):
    """Schemas of one source by what became of them."""

    def add(self, vocab: GuidanceVocab, name: str, schema: Any, instances: list[tuple[Any, bool]]) -> None:
        """Try a schema."""
        self["schemas"] += 1
        checked = check(Constraint(json_schema=json.dumps(schema)))
        if checked.problem:
            self["refused"] += 1
            self[f"why: {checked.problem[:60]}"] += 1
            return
        first = vocab.matcher(checked.lark)

        def fits(instance: Any) -> bool:
            return first.fit([*json.dumps(instance, ensure_ascii=False).encode(errors="surrogatepass"), _END])

        valid = [instance for instance, is_valid in instances if is_valid]
        wrong = [instance for instance, is_valid in instances if not is_valid and fits(instance)]
        as_given = [fits(instance) for instance in valid]
        in_order = all(
            is_fine or fits(reordered(one, schema, schema)) for one, is_fine in zip(valid, as_given, strict=True)
        )
        first.close()
        self["right"] += not wrong and all(as_given)
        self["right reordered"] += not wrong and in_order
        self["wrong, with oneOf" if '"oneOf"' in json.dumps(schema) else "wrong"] += bool(wrong)
        if wrong and '"oneOf"' not in json.dumps(schema):
            print(f"{name} lets through {json.dumps(wrong[0])[:200]}", file=sys.stderr)


def official(folder: Path) -> list[Path]:
    """Folders of the official test suite, from the source distribution of `jsonschema`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "-d", folder, "jsonschema"], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (tests,) = folder.glob("*/json/tests")
    for optional in tests.glob("*/optional"):
        shutil.rmtree(optional)
    return [tests / draft for draft in ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files, or folders of .json files (our sample)")
    parser.add_argument("--official", action="store_true", help="JSON-Schema-Test-Suite, downloaded with pip")
    parser.add_argument("--why", action="store_true", help="also list why schemas are refused")
    arguments = parser.parse_args()
    vocab, n_wrong = GuidanceVocab(cast("Vocab", Bytes())), 0
    columns = ("schemas", "refused", "right", "right reordered", "wrong, with oneOf", "wrong")
    print("| source |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    with tempfile.TemporaryDirectory() as folder:
        paths = arguments.paths + (official(Path(folder)) if arguments.official else [])
        for path in paths or [SAMPLE]:
            counts = Counts()
            for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
                for name, schema, instances in cases(file):
                    counts.add(vocab, name, schema, instances)
            print(f"| {path.name} |", " | ".join(str(counts[column]) for column in columns), "|", flush=True)
            n_wrong += counts["wrong"]
            if arguments.why:
                for why, n in counts.most_common():
                    if why.startswith("why: "):
                        print(f"  {n} {why.removeprefix('why: ')}")
    vocab.close()
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
