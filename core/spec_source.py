"""What the source text of a spec module says: signatures as written, fields with the comments beside them.

Comments carry shapes, dtypes and units, which no run-time object keeps; so the text is read (`ast` and `tokenize`), and
nothing that annotations name is imported.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc
from io import StringIO
from typing import Final

_PLUMBING: Final = ("noqa", "type:")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record, or a member of an enumeration."""

    name: str
    type: str
    default: str
    meaning: str


class SpecSource:
    """One module's text, parsed."""

    ABSTRACT: Final = "To be subclassed."
    RECORD: Final = "Record."
    CHOICE: Final = "Enumeration."

    def __init__(self, text: str) -> None:
        self._body = ast.parse(text).body
        self._comments = {
            token.start[0]: note
            for token in tokenize.generate_tokens(StringIO(text).readline)
            if token.type == tokenize.COMMENT and not (note := token.string.lstrip("# ")).startswith(_PLUMBING)
        }

    def named(self) -> Iterator[tuple[str, ast.stmt]]:
        """Names defined at the top of the module, in order."""
        for node in self._body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name, node
            elif target := _target(node):
                yield target, node

    def function(self, name: str) -> ast.FunctionDef:
        """The function of that name at the top of the module."""
        return next(node for node in self._body if isinstance(node, ast.FunctionDef) and node.name == name)

    def signature(self, function: ast.FunctionDef) -> str:
        """The `def` line as written, without `self`; one argument a line when it is long."""
        arguments = _arguments(function.args)
        returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
        mark = "@property\n" if any(ast.unparse(d) == "property" for d in function.decorator_list) else ""
        line = f"def {function.name}({', '.join(arguments)}){returns}"
        if len(line) <= 100:
            return mark + line
        return mark + "\n".join([f"def {function.name}(", *(f"    {a}," for a in arguments), f"){returns}"])

    def kind(self, node: ast.ClassDef) -> str:
        """What a reader does with the class, as a sentence."""
        bases = {ast.unparse(base) for base in node.bases}
        if bases & {"StrEnum", "Enum"}:
            return self.CHOICE
        return self.ABSTRACT if "ABC" in bases else self.RECORD

    def fields(self, node: ast.ClassDef) -> list[Field]:
        """Annotated names and enumeration members, with the comment beside or the text below."""
        found = []
        for at, statement in enumerate(node.body):
            if not (name := _target(statement)):
                continue
            below = node.body[at + 1] if at + 1 < len(node.body) else None
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            found.append(
                Field(
                    name=name,
                    type=ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else "",
                    default=ast.unparse(value) if value else "",
                    meaning=self._comments.get(statement.end_lineno or 0, "") or _literal(below),
                )
            )
        return found

    def methods(self, node: ast.ClassDef) -> list[ast.FunctionDef]:
        """Public methods, in order."""
        return [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")] + [
            n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__call__"
        ]

    def is_abstract(self, method: ast.FunctionDef) -> bool:
        """Whether a subclass must define it."""
        return any("abstractmethod" in ast.unparse(decorator) for decorator in method.decorator_list)

    def statement(self, node: ast.stmt) -> str:
        """A constant or type alias as code."""
        return ast.unparse(node)

    def text_after(self, node: ast.stmt) -> str:
        """The text that stands below a constant."""
        at = self._body.index(node)
        return _literal(self._body[at + 1] if at + 1 < len(self._body) else None)


def paragraphs(docstring: str | None) -> list[str]:
    """The blocks of a docstring that blank lines part."""
    return [block for block in cleandoc(docstring or "").split("\n\n") if block.strip()]


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != "__all__":
        return node.targets[0].id
    return ""


def _literal(node: ast.stmt | None) -> str:
    """A text that stands as a statement of its own, on one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(cleandoc(node.value.value).split())
    return ""


def _arguments(args: ast.arguments) -> list[str]:
    """Each argument as written, `self` left out."""
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [_argument(a, d) for a, d in zip(positional, defaults, strict=True) if a.arg != "self"]
    if args.vararg or args.kwonlyargs:
        found.append(f"*{ast.unparse(args.vararg)}" if args.vararg else "*")
    found += [_argument(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*found, f"**{ast.unparse(args.kwarg)}"] if args.kwarg else found


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + (f" = {ast.unparse(default)}" if default is not None else "")


__all__ = ["Field", "SpecSource", "paragraphs"]
