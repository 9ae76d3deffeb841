"""Grammars of requests: checked and compiled in threads, while the engine continues with other requests."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ggpipe.errors import GgpipeError, RunError
from ggpipe.llama.gbnf_grammar import GbnfGrammar
from ggpipe.llama.grammar import Grammar
from ggpipe.llama.guided_grammar import GuidanceVocab
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar.check import Checked, Constraint, GrammarChecker

_MOST_KEPT = 16
_MOST_AT_ONCE = 4  # further requests with new grammars wait
_STACK_BYTES = 64 << 20  # parsers are recursive


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a request is compiled, or `error` says why it is not."""

    request: int
    grammar: Grammar | None = None
    error: GgpipeError | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Compiled:
    first: Grammar
    """In its first state."""
    warnings: tuple[str, ...]

    def used_by(self, request: int) -> GrammarReady:
        return GrammarReady(request, self.first.clone(), warnings=self.warnings)


class Grammars:
    """All methods belong to one thread."""

    def __init__(self, vocab: Vocab, notify: Callable[[GrammarReady], None], forces: bool = False) -> None:
        """`notify`: gets what `prepare` has prepared, in any thread. `forces`: grammars say what they force, for
        drafting. Nothing is loaded before a grammar is needed."""
        self._vocab = vocab
        self._forces = forces
        self._notify = notify
        self._guidance = GuidanceVocab(vocab)
        self._checker = GrammarChecker()
        self._free = threading.Semaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[Constraint, _Compiled] = collections.OrderedDict()
        """By what was asked for, the one used last at the end."""
        self._pending: dict[Constraint, list[int]] = {}
        """Requests that wait for a grammar."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def known(self, request: int, constraint: Constraint) -> GrammarReady | None:
        """A grammar that was compiled before, for a request; None: have it prepared."""
        with self._lock:
            found = self._kept.get(constraint)
            if found is None:
                return None
            self._kept.move_to_end(constraint)
            return found.used_by(request)

    def prepare(self, request: int, constraint: Constraint) -> None:
        """Check and compile a grammar for a request. `notify` gets the outcome."""
        with self._lock:
            requests = self._pending.setdefault(constraint, [])
            requests.append(request)
            if len(requests) > 1:
                return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        size = threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=self._run, args=(constraint,), name="ggpipe grammar", daemon=True)
        thread.start()
        threading.stack_size(size)
        self._threads.append(thread)

    def _run(self, constraint: Constraint) -> None:
        error: GgpipeError | None = None
        compiled: _Compiled | None = None
        with self._free:
            try:
                compiled = self._compile(constraint)
            except GgpipeError as e:
                error = e
            except OSError as e:  # a process cannot be started
                error = RunError(f"a grammar cannot be checked: {e}")
        with self._lock:
            requests = self._pending.pop(constraint)
            if compiled is not None:
                self._kept[constraint] = compiled
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)[1].first.close()
            ready = [
                GrammarReady(request, error=error) if compiled is None else compiled.used_by(request)
                for request in requests
            ]
        for outcome in ready:
            self._notify(outcome)

    def _compile(self, constraint: Constraint) -> _Compiled:
        checked = self._checker.check(constraint)
        checked.raise_problem(constraint)
        return _Compiled(self._first(constraint, checked), checked.warnings)

    def _first(self, constraint: Constraint, checked: Checked) -> Grammar:
        if constraint.grammar:
            return GbnfGrammar(constraint.grammar, self._vocab)
        return self._guidance.matcher(checked.lark, self._forces)

    def close(self) -> None:
        """Free everything, when no request needs it any more. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._checker.close()
        for thread in self._threads:
            thread.join()
        for compiled in self._kept.values():
            compiled.first.close()
        self._kept.clear()
        self._guidance.close()
