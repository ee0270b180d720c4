"""Triton's interpreter without the search that takes a third of its time; what kernels compute is the same.

At each call of one jitted function from another, the interpreter lists every member of `triton.language` and of its
tensor type to wrap those that are builtins, although the launch has wrapped them already: 0.3 ms for a call, of which
a kernel of this package makes dozens for each program. Here a call looks at one of them first.
"""

from __future__ import annotations

from typing import Any

PROBE = "arange"  # a builtin of the language: wrapped if and only if the others are


def remember_what_is_wrapped() -> None:
    """Let `triton.runtime.interpreter` wrap the builtins of the language once a launch, not once a call.

    Without Triton, or with one whose interpreter is built otherwise, nothing changes.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    stock = getattr(interpreter, "_patch_lang", None)
    if stock is None or getattr(stock, "is_remembering", False) or not hasattr(tl.core, "is_builtin"):
        return
    languages: dict[int, tuple[dict[str, Any], tuple[Any, ...]]] = {}  # by the scope's id, which it keeps alive

    def patch_lang(function: Any) -> Any:
        scope = function.__globals__
        if id(scope) not in languages:
            found = tuple(value for value in scope.values() if value is tl or value is tl.core)
            languages[id(scope)] = (scope, found)
        found = languages[id(scope)][1]
        if found and not any(tl.core.is_builtin(getattr(language, PROBE)) for language in found):
            return interpreter._LangPatchScope()  # of nothing: whoever wrapped them restores them
        return stock(function)

    patch_lang.is_remembering = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang
