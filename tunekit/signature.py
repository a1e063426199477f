# SPDX-License-Identifier: Apache-2.0
"""C types, parameter annotations and the prototypes that follow from them.

A tuned function's annotations are its C prototype::

    def gemm(a: Annotated[In[f32], "m", "k"], b: Annotated[In[f32], "k", "n"], c: Annotated[Out[f32], "m", "n"],
             m: i32, k: i32, n: i32) -> None

``In[T]`` is ``const T *``, ``Out[T]`` and ``InOut[T]`` are ``T *``. The sizes are optional, expressions of the
integer parameters; an array must then have exactly that shape, or be 1-D with as many elements. They are ordinary
typing metadata, so linters and type checkers leave them alone.

Pointers are ``restrict``, so an output that overlaps another argument is refused before any C runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

from tunekit.errors import DeclarationError


@dataclass(frozen=True)
class CType:
    """A scalar C type: ``name`` as written in annotations, ``c`` as written in C, ``dtype`` as NumPy names it."""

    name: str
    c: str
    dtype: str
    size: int
    low: int | None = None
    high: int | None = None

    @property
    def is_integer(self) -> bool:
        return self.low is not None

    def __repr__(self) -> str:
        return self.name


def _integer(name: str, c: str, dtype: str, bits: int, signed: bool) -> CType:
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
    return CType(name, c, dtype, bits // 8, low, high)


# fmt: off
C_TYPES: dict[str, CType] = {t.name: t for t in (
    _integer("i8",  "int8_t",   "int8",   8,  True),
    _integer("u8",  "uint8_t",  "uint8",  8,  False),
    _integer("i16", "int16_t",  "int16",  16, True),
    _integer("u16", "uint16_t", "uint16", 16, False),
    _integer("i32", "int32_t",  "int32",  32, True),
    _integer("u32", "uint32_t", "uint32", 32, False),
    _integer("i64", "int64_t",  "int64",  64, True),
    _integer("u64", "uint64_t", "uint64", 64, False),
    CType("f32", "float",  "float32", 4),
    CType("f64", "double", "float64", 8),
)}
# fmt: on

# Keywords of C23 (6.4.1) and of GNU C, without those that begin with an underscore and are no names here anyway.
_C = """
alignas alignof asm auto bool break case char const constexpr continue default do double else enum extern false float
for fortran goto if inline int long nullptr register restrict return short signed sizeof static static_assert struct
switch thread_local true typedef typeof typeof_unqual union unsigned void volatile while
_Alignas _Alignof _Atomic _BitInt _Bool _Complex _Decimal128 _Decimal32 _Decimal64 _Generic _Imaginary _Noreturn
_Static_assert _Thread_local
"""
# Keywords and alternative tokens of C++23 (lex.key, lex.digraph).
_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
# Cython's reserved words beyond Python's, and names that its declarations take for types or modifiers.
_CYTHON = """
include ctypedef cdef cpdef cimport DEF IF ELIF ELSE print exec by gil nogil fused readonly api bint object
"""
C_WORDS = frozenset(f"{_C} {_CPP} {_CYTHON}".split())
"""Words that C, C++ or Cython keeps for itself; those of Python are :mod:`keyword`'s."""
HEADER_WORDS = frozenset(t.c for t in C_TYPES.values()) | frozenset(
    "NULL errno INFINITY NAN EOF linux unix size_t ssize_t ptrdiff_t intptr_t uintptr_t intmax_t uintmax_t wint_t "
    "Py_ssize_t complex imaginary I noreturn offsetof assert stdin stdout stderr "
    "isnan isinf isfinite isnormal signbit fpclassify isgreater isgreaterequal isless islessequal islessgreater "
    "isunordered".split()
)
"""Names that the headers of every row and consumer bring: types and macros."""

T = TypeVar("T")

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # A checker sees a scalar as Any and a pointer as an array: that is what reference bodies and callers handle.
    i8: TypeAlias = Any
    u8: TypeAlias = Any
    i16: TypeAlias = Any
    u16: TypeAlias = Any
    i32: TypeAlias = Any
    u32: TypeAlias = Any
    i64: TypeAlias = Any
    u64: TypeAlias = Any
    f32: TypeAlias = Any
    f64: TypeAlias = Any
    In = NDArray[T]
    Out = NDArray[T]
    InOut = NDArray[T]
else:
    i8, u8, i16, u16 = (C_TYPES[n] for n in ("i8", "u8", "i16", "u16"))
    i32, u32, i64, u64 = (C_TYPES[n] for n in ("i32", "u32", "i64", "u64"))
    f32, f64 = C_TYPES["f32"], C_TYPES["f64"]

    class _Pointer:
        """``In[T]`` and its siblings; holds the element type until the signature is read."""

        def __init__(self, direction: str, element: Any = None) -> None:
            self.direction, self.element = direction, element

        def __getitem__(self, element: Any) -> _Pointer:
            return _Pointer(self.direction, element)

        def __repr__(self) -> str:
            return f"{self.direction}[{self.element!r}]"

        def __call__(self) -> None:  # typing (Annotated) accepts callables only
            raise TypeError(f"{self!r} is an annotation, not a function")

    In, Out, InOut = _Pointer("In"), _Pointer("Out"), _Pointer("InOut")


# --- sizes -----------------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Size:
    """One dimension of an array parameter, an expression of the integer parameters."""

    text: str

    def names(self) -> frozenset[str]:
        return frozenset(n.id for n in ast.walk(ast.parse(self.text, mode="eval")) if isinstance(n, ast.Name))

    def check(self) -> str | None:
        """None, or what is wrong with the expression."""
        try:
            tree = ast.parse(self.text, mode="eval").body
        except SyntaxError:
            return "it is not an expression"
        for node in ast.walk(tree):
            legal = isinstance(node, (ast.BinOp, ast.Name, ast.Load, ast.operator)) or (
                isinstance(node, ast.Constant) and type(node.value) is int
            )
            if not legal or (isinstance(node, ast.operator) and type(node) not in _OPERATORS):
                return "it may hold integer parameters, whole numbers, + - * // and parentheses only"
        return None

    def value(self, scalars: Mapping[str, int]) -> int:
        return _evaluator(self.text)(scalars)


@functools.lru_cache(maxsize=1024)
def _evaluator(text: str) -> Callable[[Mapping[str, int]], int]:
    """A size expression as a function of the scalars: it is read once, and evaluated at every call of a kernel."""

    def build(node: ast.expr) -> Callable[[Mapping[str, int]], int]:
        if isinstance(node, ast.BinOp):
            combine, left, right = _OPERATORS[type(node.op)], build(node.left), build(node.right)
            return lambda scalars: combine(left(scalars), right(scalars))
        if isinstance(node, ast.Name):
            return operator.itemgetter(node.id)
        number = int(node.value)  # type: ignore[attr-defined]  # check() let only whole numbers through
        return lambda scalars: number

    return build(ast.parse(text, mode="eval").body)


# --- signatures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One parameter: a scalar (``direction`` None) or a pointer (``In``, ``Out``, ``InOut``)."""

    name: str
    ctype: CType
    direction: str | None = None
    sizes: tuple[Size, ...] = ()

    @functools.cached_property
    def is_pointer(self) -> bool:
        return self.direction is not None

    @functools.cached_property
    def writes(self) -> bool:
        return self.direction in ("Out", "InOut")

    def declaration(self, restrict: str = "restrict ") -> str:
        """The parameter in C; ``restrict`` is the qualifier's spelling (empty for C++ and cffi)."""
        if not self.is_pointer:
            return f"{self.ctype.c} {self.name}"
        const = "" if self.writes else "const "
        return f"{const}{self.ctype.c} *{restrict}{self.name}"


@dataclass(frozen=True)
class Signature:
    """A function's C signature, as plain data."""

    parameters: tuple[Parameter, ...]
    returns: CType | None

    def prototype(self, symbol: str, restrict: str = "restrict ") -> str:
        """The C prototype of ``symbol``, without a semicolon."""
        arguments = ", ".join(p.declaration(restrict) for p in self.parameters) or "void"
        return f"{self.returns.c if self.returns else 'void'} {symbol}({arguments})"

    def describe(self) -> dict[str, Any]:
        """The signature as JSON-able data (part of a declaration's digest)."""
        return {
            "returns": self.returns.name if self.returns else None,
            "parameters": [[p.name, p.ctype.name, p.direction, [s.text for s in p.sizes]] for p in self.parameters],
        }


def _annotation(where: str, name: str, annotation: Any) -> Parameter:
    sizes: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        sizes = tuple(extra)
    if isinstance(annotation, CType):
        return Parameter(name, annotation)
    direction = getattr(annotation, "direction", None)
    element = getattr(annotation, "element", None)
    if direction is None or not isinstance(element, CType):
        raise DeclarationError(
            f"{where}: parameter {name!r} is annotated {annotation!r}, which has no C type; "
            f"use one of {', '.join(C_TYPES)}, or In[...], Out[...], InOut[...] of one"
        )
    parsed = []
    for size in sizes:
        expression = Size(str(size))
        fault = expression.check()
        if fault:
            raise DeclarationError(f"{where}: size {size!r} of parameter {name!r}: {fault}")
        parsed.append(expression)
    return Parameter(name, element, direction, tuple(parsed))


def signature_of(function: Callable[..., Any], where: str) -> Signature:
    """Read a function's annotations into a :class:`Signature`.

    Args:
        function: the annotated function.
        where: how errors name it, such as ``kernel 'gemm'``.

    Raises:
        DeclarationError: no return annotation, a parameter without annotation or C type, ``*args`` or defaults.
    """
    try:
        annotations = inspect.get_annotations(function, eval_str=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DeclarationError(
            f"{where}: its annotations cannot be evaluated ({error}); import every name in them"
        ) from error
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise DeclarationError(f"{where}: parameter {name!r} is not positional; a C function has no other kind")
        if parameter.default is not parameter.empty:
            raise DeclarationError(f"{where}: parameter {name!r} has a default; a C function has none, remove it")
        if not name.isascii() or name in C_WORDS | HEADER_WORDS or name.startswith("tk_"):
            raise DeclarationError(
                f"{where}: parameter {name!r} cannot be a C parameter "
                f"(a keyword of C, C++ or Cython, a name of C's headers, not ASCII, or tk_...); rename it"
            )
        if name not in annotations:
            raise DeclarationError(
                f"{where}: parameter {name!r} has no annotation; write its C type, such as {name}: i32"
            )
        parameters.append(_annotation(where, name, annotations[name]))
    if "return" not in annotations:
        raise DeclarationError(f"{where}: it has no return annotation; write -> None or a C type such as -> i32")
    returns = annotations["return"]
    if returns is not None and not isinstance(returns, CType):
        raise DeclarationError(
            f"{where}: its return annotation {returns!r} has no C type; use None or one of {', '.join(C_TYPES)}"
        )
    scalars = {p.name for p in parameters if not p.is_pointer and p.ctype.is_integer}
    for p in parameters:
        for size in p.sizes:
            unknown = sorted(size.names() - scalars)
            if unknown:
                raise DeclarationError(
                    f"{where}: size {size.text!r} of parameter {p.name!r} names {', '.join(unknown)}, "
                    f"which is no integer parameter of it"
                )
    return Signature(tuple(parameters), returns)


# --- checking a call -------------------------------------------------------------------------------------


def _scalar(where: str, p: Parameter, value: Any) -> int | float:
    if type(value) is float and not p.ctype.is_integer:  # nearly always
        return value
    if p.ctype.is_integer:
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{where}: {p.name} must be a whole number ({p.ctype}), not {type(value).__name__}"
            ) from None
        if p.ctype.low is None or p.ctype.high is None or not p.ctype.low <= number <= p.ctype.high:
            raise ValueError(f"{where}: {p.name}={number} does not fit {p.ctype}")
        return number
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, (str, bytes, bytearray, memoryview)) or kind in "SUOV":  # float() would read their text
        raise TypeError(f"{where}: {p.name} must be a number ({p.ctype}), not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where}: {p.name} is too large for {p.ctype}") from None
    except (TypeError, ValueError):
        raise TypeError(f"{where}: {p.name} must be a number ({p.ctype}), not {type(value).__name__}") from None


@functools.lru_cache(maxsize=16)
def _numpy(name: str) -> tuple[Any, Any]:
    """NumPy's array class, and one of its dtypes."""
    import numpy as np

    return np.ndarray, np.dtype(name)


def _array(where: str, p: Parameter, value: Any) -> None:
    ndarray, dtype = _numpy(p.ctype.dtype)
    if not isinstance(value, ndarray):
        raise TypeError(f"{where}: {p.name} must be a NumPy array of {p.ctype.dtype}, not {type(value).__name__}")
    if value.dtype is not dtype and value.dtype != dtype:
        raise TypeError(
            f"{where}: {p.name} must have dtype {p.ctype.dtype}, not {value.dtype}; "
            f"convert it with .astype(np.{p.ctype.dtype})"
        )
    flags = value.flags
    if not flags.c_contiguous:
        raise ValueError(f"{where}: {p.name} must be C-contiguous; pass np.ascontiguousarray({p.name})")
    if not flags.aligned:
        raise ValueError(f"{where}: {p.name} is not aligned to its elements; pass {p.name}.copy()")
    if p.writes and not flags.writeable:
        raise ValueError(f"{where}: {p.name} is an output and the array is read-only; pass a writeable one")


def bind_names(where: str, signature: Signature, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Positional and named arguments in the order of the signature. Raises TypeError like a Python call."""
    names = [p.name for p in signature.parameters]
    for name in named:
        if name not in names:
            raise TypeError(f"{where} has no parameter {name!r}; it takes {', '.join(names)}")
        if names.index(name) < len(arguments):
            raise TypeError(f"{where} got {name!r} twice")
    missing = [name for name in names[len(arguments) :] if name not in named]
    if missing:
        raise TypeError(f"{where} misses {', '.join(missing)}")
    return (*arguments, *(named[name] for name in names[len(arguments) :]))


def quick_check(signature: Signature, address: Callable[[Any], int]) -> Callable[..., tuple[Any, ...] | None]:
    """A function of a call's positional arguments: what C gets where they plainly fit, else None.

    Then :func:`check_call` decides. It is generated for the signature, one condition after the other, because a small
    kernel is over before a loop over parameters has begun. It never accepts what :func:`check_call` refuses.

    Args:
        signature: whose arguments.
        address: of a contiguous array's first element.
    """
    import numpy as np

    scope: dict[str, Any] = {"ndarray": np.ndarray, "address": address}
    known = {p.name: f"v_{p.name}" for p in signature.parameters}
    pointers = [p for p in signature.parameters if p.is_pointer]
    lines = []

    def unless(condition: str) -> None:
        lines.append(f"        if not ({condition}): return None")

    for p in signature.parameters:
        value = known[p.name]
        if p.is_pointer:
            scope[f"d_{p.name}"] = np.dtype(p.ctype.dtype)
            unless(f"type({value}) is ndarray and {value}.dtype is d_{p.name}")
            lines.append(f"        flags = {value}.flags")
            unless("flags.carray" if p.writes else "flags.c_contiguous and flags.aligned")
        elif p.ctype.is_integer:
            unless(f"type({value}) is int and {p.ctype.low} <= {value} <= {p.ctype.high}")
        else:
            unless(f"type({value}) is float")
    for p in pointers:
        if p.sizes:
            shape = ", ".join(_renamed(size.text, known) for size in p.sizes)
            unless(f"{known[p.name]}.shape == ({shape},)")
        lines.append(f"        a_{p.name} = address({known[p.name]})")
    for p in pointers:
        for q in pointers:
            if p.writes and q is not p:
                first, second = (f"a_{p.name}", known[p.name]), (f"a_{q.name}", known[q.name])
                apart = [f"{a[0]} >= {b[0]} + {b[1]}.nbytes" for a, b in ((first, second), (second, first))]
                unless(" or ".join(apart))
    values = ", ".join(f"a_{p.name}" if p.is_pointer else known[p.name] for p in signature.parameters)
    body = "\n".join([*lines, f"        return ({values}{',' if values else ''})"])
    text = f"def quick({', '.join(known.values())}):\n    try:\n{body}\n    except ZeroDivisionError: return None\n"
    exec(compile(text, "<a signature of tunekit>", "exec"), scope)
    quick: Callable[..., tuple[Any, ...] | None] = scope["quick"]
    return quick


def _renamed(text: str, known: Mapping[str, str]) -> str:
    """A size expression with its names replaced; :meth:`Size.check` let only arithmetic through."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = known[node.id]
    return f"({ast.unparse(tree)})"


def check_call(where: str, signature: Signature, arguments: Sequence[Any]) -> list[Any]:
    """Check a call's arguments; return them with scalars converted (arrays as they are).

    Raises:
        TypeError: wrong number of arguments, not an array, wrong dtype, not a number.
        ValueError: wrong shape, not contiguous, read-only output, out-of-range scalar, overlapping output.
    """
    if len(arguments) != len(signature.parameters):
        names = ", ".join(p.name for p in signature.parameters)
        raise TypeError(f"{where} takes {len(signature.parameters)} arguments ({names}), got {len(arguments)}")
    checked: list[Any] = []
    scalars: dict[str, int] = {}
    for p, value in zip(signature.parameters, arguments, strict=True):
        if p.is_pointer:
            _array(where, p, value)
            checked.append(value)
        else:
            number = _scalar(where, p, value)
            checked.append(number)
            if p.ctype.is_integer:
                scalars[p.name] = int(number)
    arrays = [(p, a) for p, a in zip(signature.parameters, checked, strict=True) if p.is_pointer]
    for p, array in arrays:
        if not p.sizes:
            continue
        try:
            shape = tuple(size.value(scalars) for size in p.sizes)
        except ZeroDivisionError:
            sizes = ", ".join(s.text for s in p.sizes)
            raise ValueError(f"{where}: the shape ({sizes}) of {p.name} divides by zero with {scalars}") from None
        if array.shape == shape:
            continue
        if min(shape) < 0 or array.shape != (math.prod(shape),):
            raise ValueError(
                f"{where}: {p.name} must have shape ({', '.join(s.text for s in p.sizes)}) = {shape}, got {array.shape}"
            )
    writes = [(p, a) for p, a in arrays if p.writes and a.size]
    if writes and len(arrays) > 1:
        import numpy as np

        for p, out in writes:
            for q, other in arrays:
                if q is not p and np.may_share_memory(out, other):
                    raise ValueError(f"{where}: output {p.name} overlaps {q.name}; pass separate arrays")
    return checked
