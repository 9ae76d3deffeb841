"""Checks grammars and schemas before an engine follows them: `check` in this process, `GrammarChecker` in others.

Processes of the checker have limits of time and memory. What it lets pass, the head compiles in a thread.
"""

from __future__ import annotations

import threading

import msgspec

from ggpipe.config.sampling import CallGrammar, SamplingConfig, ToolSchema
from ggpipe.errors import BodyError, SettingError, UsageError
from ggpipe.text.grammar import gbnf
from ggpipe.text.grammar.json_schema import NO_FORCING, guidance_schema, parse_schema, problem_of
from ggpipe.text.limited_process import Exceeded, LimitedProcess, Limits, answer_questions

LIMITS = Limits(cpu_s=5, memory_bytes=1 << 31)
"""What a process that checks may use."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What an output is constrained by: the fields of SamplingConfig, of which at most one is set."""

    grammar: str = ""
    json_schema: str = ""
    call_grammar: CallGrammar | None = None

    @staticmethod
    def of(sampling: SamplingConfig) -> Constraint | None:
        """That of a request; None if there is none."""
        own = Constraint(grammar=sampling.grammar, json_schema=sampling.json_schema, call_grammar=sampling.call_grammar)
        return own if own != Constraint() else None


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a check."""

    lark: str = ""
    """The grammar for llguidance; empty: it is one in GBNF."""
    warnings: tuple[str, ...] = ()
    """What the user should know, each the rest of a sentence whose subject is the schema."""
    problem: str = ""
    """Why it is refused, as the rest of such a sentence; empty: it is not."""
    at: str = ""
    """The tool's schema that is refused, as in `tools[0].function.parameters`; empty: the only one."""

    def raise_problem(self, constraint: Constraint) -> None:
        """Raises SettingError or BodyError if it is refused."""
        if self.at:
            raise BodyError(f"`{self.at}` {self.problem}", self.at)
        if self.problem:
            raise SettingError("grammar" if constraint.grammar else "json_schema", self.problem)


def check(constraint: Constraint) -> Checked:
    """Check in this process, without limits."""
    try:
        if constraint.grammar:
            gbnf.check(constraint.grammar)
            return Checked()
        if constraint.call_grammar is not None:
            return _check_calls(constraint.call_grammar)
        found = parse_schema(constraint.json_schema)
        schema, warnings = guidance_schema({"type": "object"} if found == {} else found)
    except SettingError as e:
        return Checked(problem=str(e.problem))
    problem = _problem(schema)
    lark = f"{NO_FORCING}start: %json {schema}\n"
    return Checked(problem=problem) if problem else Checked(lark=lark, warnings=tuple(warnings))


def _problem(schema: str) -> str:
    """What llguidance refuses about a schema; empty: nothing."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
    return problem_of(messages[0]) if is_error else ""


def _check_calls(calls: CallGrammar) -> Checked:
    """Schemas that cannot be followed count as any object, except in strict tools."""
    rules = []
    for number, tool in enumerate(calls.schemas):
        rule = tool.fallback
        try:
            schema, _ = guidance_schema(parse_schema(tool.schema))
            problem = _problem(schema)
            if not problem:
                rule = f"%json {schema}"
        except SettingError as e:
            problem = str(e.problem)
        if problem and tool.is_strict:
            return Checked(problem=problem, at=tool.at)
        rules.append(f"{ToolSchema.rule(number)}: {rule}")
    return Checked(lark="\n".join((calls.lark, *rules, "")))


class GrammarChecker:
    """Checks in processes with limits. One per check at a time; idle ones are kept. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[LimitedProcess] = []
        self._all: set[LimitedProcess] = set()
        self._is_closed = False

    def check(self, constraint: Constraint) -> Checked:
        """Check a constraint. Takes a tenth of a second at first, then what it takes."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or self._start()
        if process is None:
            return Checked(problem="is not checked any more: the engine ends")
        answer = process.ask(msgspec.msgpack.encode(constraint))
        with self._lock:
            if answer is not None and not self._is_closed:
                self._idle.append(process)
                return msgspec.msgpack.decode(answer, type=Checked)
            self._all.discard(process)
            problem = _problem_of_limits(process.end())
        return Checked(problem=problem)

    def _start(self) -> LimitedProcess | None:
        with self._lock:
            if self._is_closed:
                return None
            process = LimitedProcess("ggpipe.text.grammar.check", LIMITS)
            self._all.add(process)
            return process

    def close(self) -> None:
        """End all processes. Checks that are being made fail. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            processes, self._all = self._all, set()
            idle, self._idle = self._idle, []
            for process in processes:  # none of them can be another process by now
                process.kill()
        for process in idle:
            process.end()


def _problem_of_limits(exceeded: Exceeded) -> str:
    """The rest of a sentence whose subject is the grammar."""
    if exceeded is Exceeded.TIME:
        return f"takes more than {LIMITS.cpu_s} s to read: simplify it"
    return f"takes more than {LIMITS.memory_bytes >> 30} GiB of memory, or is too deep: simplify it"


def checked(constraint: Constraint) -> Checked:
    """Check a constraint in a process of its own. Raises SettingError and BodyError if it is refused."""
    checker = GrammarChecker()
    try:
        found = checker.check(constraint)
    finally:
        checker.close()
    found.raise_problem(constraint)
    return found


def _answer(question: bytes) -> bytes:
    try:
        found = check(msgspec.msgpack.decode(question, type=Constraint))
    except (UsageError, MemoryError, RecursionError, ValueError) as e:
        found = Checked(problem=f"cannot be read: {type(e).__name__}")
    return msgspec.msgpack.encode(found)


if __name__ == "__main__":
    answer_questions(_answer, LIMITS)
