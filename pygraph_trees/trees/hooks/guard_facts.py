"""What Dynamo's guards read, as facts that C++ compares faster than it runs guards (``native/memo.h``).

:func:`facts_of` walks the tree of guards with the objects of one call. Guards on module trees and on tensors become
facts, and their nodes are ``dropped``; all others stay in a clone of the tree. A guard is only dropped if its result
follows from the facts, and only kept if it works in a clone: :class:`Refused` is raised for any other one.
"""

from __future__ import annotations

import ast
import builtins
import re
from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from pygraph_trees.compat import dynamic_mark
from pygraph_trees.reasons import Reason

from .attributes import METHOD, Absent, attribute_of, entries_of, is_constant

_IDENTITY = frozenset({"ID_MATCH", "TYPE_MATCH", "NOT_NONE"})
_OF_DICT = _IDENTITY | {"DICT_CONTAINS", "DICT_LENGTH", "DICT_VERSION"}
_OF_TENSOR = _IDENTITY | {
    *("TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "DYNAMIC_INDICES", "NO_HASATTR", "NO_TENSOR_ALIASING"),
    "SYMBOLIC_SHAPE_GUARD",  # reads sizes, strides and offsets only
}
_OF_CONSTANT = _IDENTITY | {"EQUALS_MATCH", "LENGTH_CHECK", "NONE_MATCH", "TRUE_MATCH", "FALSE_MATCH", "FLOAT_IS_NAN"}
# These have no state of their own, and none of the tree in which they were made.
_KEPT = (_OF_DICT | _OF_CONSTANT | _OF_TENSOR) - {"TENSOR_MATCH", "NO_TENSOR_ALIASING", "SYMBOLIC_SHAPE_GUARD"} | {
    *("SET_CONTAINS", "TUPLE_ITERATOR_LEN", "RANGE_ITERATOR_MATCH", "COMPLEX_IS_NAN", "DUAL_LEVEL_MATCH"),
    *("WEAKREF_ALIVE", "LAMBDA_GUARD", "GLOBAL_STATE", "TORCH_FUNCTION_MODE_STACK", "DEFAULT_DEVICE"),
}
_OF_FUNCTION = {"Code": "__code__", "Closure": "__closure__"}  # by accessor
_OF_FUNCTION |= {"FuncDefaults": "__defaults__", "FuncKwDefaults": "__kwdefaults__"}
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LOCAL = re.compile(r"L\['(\w+)'\]")
_NO_HOOKS = "torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None "

Step = tuple[str, Any, Any, Any]  # kind, object, and two values whose meaning depends on the kind
Variable = tuple[bool, str, Any, Any, bool]  # global or not, name, item or None, object, whether its offset counts


class _ClassDict(dict[str, Any]):
    """The attributes of a class."""


_FIXED: dict[Any, frozenset[str]] = {tuple: _IDENTITY | {"LENGTH_CHECK"}, _ClassDict: _OF_DICT}  # with their class


class Refused(Exception):
    """There is no memo; ``args`` has the reason, for example a guard that must stay and does not work in a clone."""


@dataclass(slots=True)
class Facts:
    steps: list[Step] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)  # sources of nodes
    kept: set[str] = field(default_factory=set)
    held: dict[str, Any] = field(default_factory=dict)  # objects that are the same in each call, by source
    are_distinct: bool = True  # whether which of these are the same object is all that the last guards ask
    free: tuple[str, ...] = ()  # names of local variables that are the same objects in each call
    reads_modules: bool = True  # whether objects that are attributes of Python's modules may be facts


def facts_of(
    root: Any,
    local_variables: dict[str, Any],
    global_variables: dict[str, Any],
    free: tuple[str, ...],
    *,
    reads_modules: bool,
) -> Facts:
    facts = Facts(free=free, reads_modules=reads_modules)
    for accessor, node in _children(root):
        kind = type(accessor).__name__
        if kind == "GlobalsGuardAccessor":
            facts.kept.add(node.get_source())
            for inner, child in _children(node):
                _visit_variable(facts, child, True, global_variables, _key_of(inner))
        elif kind == "FrameLocalsGuardAccessor":
            found = _LOCAL.fullmatch(node.get_source())
            _visit_variable(facts, node, False, local_variables, found and found[1])
        else:
            _keep(facts, node)
    facts.dropped -= facts.kept
    facts.are_distinct = _compare_objects(facts, root, global_variables)
    facts.steps = list({(kind, *map(id, objects)): (kind, *objects) for kind, *objects in facts.steps}.values())
    # Looking up an item may run code of a key, so objects whose facts follow are looked up last.
    facts.variables.sort(key=lambda variable: not isinstance(variable[3], torch.Tensor))
    return facts


def cloned(root: Any, facts: Facts) -> Any:
    """The guards that are not facts."""
    clone = root.clone_manager(lambda node: node.get_source() not in facts.dropped)
    for node in _nodes(clone):
        for leaf in (*_leaves(node), *(_names(clone.get_epilogue_lambda_guards()) if node is clone else ())):
            if leaf not in _KEPT:
                raise Refused(Reason.GUARD_UNKNOWN(kind=leaf))
    return clone


def single(clone: Any, facts: Facts) -> list[tuple[Any, str | None]] | None:
    """The guards of a clone and the names of the variables that they check, or None for all of them.

    None if guards check parts of variables, or compare objects that facts do not hold. The guard that wants no hooks
    for saved tensors is left out: C++ looks for hooks itself.
    """
    found: list[tuple[Any, str | None]] = [
        (leaf, None) for leaf in clone.get_leaf_guards() if not leaf.verbose_code_parts()[0].startswith(_NO_HOOKS)
    ]
    for node in clone.get_child_managers():
        name, leaves = _LOCAL.fullmatch(node.get_source()), _leaves(node)
        is_sized = not hasattr(node, "get_key_value_managers") or {"TYPE_MATCH", "DICT_LENGTH"} <= leaves
        is_plain = name is not None and "LAMBDA_GUARD" not in leaves  # the tree would keep modes out of its code
        if len(list(_nodes(node))) > 1 or not is_sized or (leaves and not is_plain):
            return None
        found += [(leaf, name and name[1]) for leaf in node.get_leaf_guards()]
    return found if facts.are_distinct else None


def _compare_objects(facts: Facts, root: Any, global_variables: dict[str, Any]) -> bool:
    """Whether the last guards follow from facts, to which those on the objects that they compare are added."""
    count = len(facts.steps)
    try:
        for guard in root.get_epilogue_lambda_guards():
            for part in guard.verbose_code_parts():
                compared = ast.parse(part.split("  #")[0].strip(), mode="eval").body
                if not (isinstance(compared, ast.Compare) and [*map(type, compared.ops)] == [ast.Is]):
                    raise LookupError
                one, other = (_object_at(facts, at, global_variables) for at in (compared.left, *compared.comparators))
                if one is not other:
                    raise LookupError
    except (LookupError, SyntaxError, TypeError, ValueError, Absent):
        del facts.steps[count:]
        return False
    return True


def _object_at(facts: Facts, source: ast.expr, global_variables: dict[str, Any]) -> Any:
    """What a source like ``G['module'].attribute`` stands for, an object that facts then hold."""
    if (text := ast.unparse(source)) in facts.held:
        return facts.held[text]
    if isinstance(source, ast.Attribute):
        found = _part_of(facts, _object_at(facts, source.value, global_variables), "GetAttr", source.attr)
    elif isinstance(source, ast.Call) and ast.unparse(source.func) == "object.__getattribute__":
        owner, name = _object_at(facts, source.args[0], global_variables), ast.literal_eval(source.args[1])
        found = _part_of(facts, owner, "GenericGetAttr", name)
    elif not isinstance(source, ast.Subscript) or not isinstance(source.slice, ast.Constant):
        raise LookupError
    elif ast.unparse(source.value) == "G":
        found = global_variables[name := str(source.slice.value)]
        facts.steps.append(("item", global_variables, name, found))
        if not _is_fixed(found):
            raise LookupError
    else:
        items = _object_at(facts, source.value, global_variables)
        if type(items) is not dict:
            raise LookupError
        facts.steps.append(("dict", items, None, None))
        found = items[source.slice.value]
    if found is METHOD or is_constant(found):  # not always the same object
        raise LookupError
    if _has_dict(found):
        facts.steps.append(("object", found, found.__dict__, None))
    facts.held[text] = found
    return found


def _visit_variable(facts: Facts, node: Any, is_global: bool, variables: dict[str, Any], name: str | None) -> None:
    if name is None or name not in variables:
        return _keep(facts, node)
    value = variables[name]
    if _drop_tensor(facts, node, is_global, name, None, value):
        return None
    if type(value) in (tuple, list, dict) and value is not vars(builtins):
        facts.kept.add(node.get_source())
        for key, child in _items(node, value):
            if key is None or not _drop_tensor(facts, child, is_global, name, key, value[key]):
                _keep(facts, child)
        return None
    if is_global and _is_fixed(value):
        facts.steps.append(("item", variables, name, value))
    elif _has_dict(value) or (name in facts.free and isinstance(value, FunctionType)):
        facts.variables.append((is_global, name, None, value, False))
    else:
        return _keep(facts, node)
    _visit(facts, node, value)
    return None


def _drop_tensor(facts: Facts, node: Any, is_global: bool, name: str, item: Any, value: Any) -> bool:
    is_any = _is_plain_tensor(node, value) and vars(value).keys() <= {dynamic_mark()}
    if not is_any or any("ID_MATCH" in _leaves(child) for child in _nodes(node)):
        return False
    facts.steps += _of_class(node, value)
    facts.variables.append((is_global, name, item, value, any(True for _ in _children(node))))
    facts.dropped.update(child.get_source() for child in _nodes(node))
    return True


def _of_class(node: Any, tensor: torch.Tensor) -> list[Step]:
    """A tensor's own facts say nothing of attributes that its class gets."""
    return [("class", type(tensor), None, None)] if "NO_HASATTR" in _leaves(node) else []


def _is_plain_tensor(node: Any, value: Any) -> bool:
    is_plain = type(value) in _TENSORS and value.layout is torch.strided and not value.is_nested
    return is_plain and all(
        _leaves(child) <= _OF_TENSOR
        and all(type(accessor).__name__.startswith("TensorProperty") for accessor, _ in _children(child))
        for child in _nodes(node)
    )


def _visit(facts: Facts, node: Any, value: Any) -> bool:
    """Adds facts about an object that an earlier fact holds, and objects in it; returns if they replace its node."""
    leaves, children = _leaves(node), list(_children(node))
    if not (is_constant(value) or isinstance(value, _ClassDict)):
        facts.held[node.get_source()] = value
    if type(value) in _TENSORS:
        is_covered = _is_plain_tensor(node, value)
        if is_covered:
            facts.steps += [*_of_class(node, value), ("tensor", value, None, None)]
    elif type(value) is dict and value is not vars(builtins):
        facts.steps.append(("dict", value, None, None))
        is_covered = _visit_items(facts, node, value) and leaves <= _OF_DICT
    elif _has_dict(value):
        facts.steps.append(("object", value, value.__dict__, None))
        is_covered = leaves <= _IDENTITY | {"NO_HASATTR"} and _lacks_attributes(facts, node, value)
        is_covered &= _visit_parts(facts, value, children)
    elif is_constant(value):
        is_covered = all(_leaves(child) <= _OF_CONSTANT for child in _nodes(node))
    elif isinstance(value, dict) and not value:
        facts.steps += [("object", value, None, None), ("empty", value, None, None)]
        is_covered = leaves <= _OF_DICT and not children
    else:
        kind = "function" if isinstance(value, FunctionType) else "object"
        facts.steps += [] if type(value) in _FIXED else [(kind, value, None, None)]
        is_covered = _visit_parts(facts, value, children) and leaves <= _FIXED.get(type(value), _IDENTITY)
    is_covered &= type(value) is dict or not hasattr(node, "get_key_value_managers")  # as an ordered dictionary has
    if is_covered:
        facts.dropped.update(child.get_source() for child in _nodes(node))
    elif type(value) in _TENSORS or is_constant(value):
        _keep(facts, node)
    else:
        facts.kept.add(node.get_source())
    return is_covered


def _visit_parts(facts: Facts, value: Any, children: list[tuple[Any, Any]]) -> bool:
    is_covered = True
    for accessor, child in children:
        try:
            kind, text = type(accessor).__name__.removesuffix("GuardAccessor"), accessor.repr()
            name = (
                text[text.index("(") + 1 : -1] if kind in ("GetAttr", "GenericGetAttr") else _OF_FUNCTION.get(kind, "")
            )
            part = _part_of(facts, value, kind, name, _key_of(accessor))
            if part is METHOD and (_leaves(child) or list(_children(child))):  # its existence follows from facts
                raise LookupError
            is_covered &= part is METHOD or _visit(facts, child, part)
        except (LookupError, TypeError, ValueError, Absent):
            _keep(facts, child)
            is_covered = False
    return is_covered


def _part_of(facts: Facts, value: Any, kind: str, attribute: str, key: Any = None) -> Any:
    """What an accessor reads of an object that facts hold, and that they then hold, too; an error for others."""
    is_generic = kind == "GenericGetAttr"
    if isinstance(value, FunctionType) and attribute in ("__name__", *_OF_FUNCTION.values()):
        return getattr(value, attribute)
    if isinstance(value, CellType) and attribute == "cell_contents" and _is_fixed(value.cell_contents):
        facts.steps.append(("cell", value, value.cell_contents, None))
        return value.cell_contents
    if type(value) is ModuleType or value is vars(builtins):
        items: Any = vars(value) if type(value) is ModuleType else value
        found = items[name := attribute or key]
        # No fact tells a tuple or a property from a later one at its address.
        if _is_fixed(found) or (facts.reads_modules and not isinstance(found, (tuple, property))):
            facts.steps.append(("item" if _is_fixed(found) else "borrowed", items, name, found))
            return found
    if isinstance(value, type) and kind in ("TypeDict", "TypeMRO"):
        facts.steps.append(("class", value, None, None))
        return _ClassDict(value.__dict__) if kind == "TypeDict" else value.__mro__
    if type(value) in _FIXED and kind in ("TupleGetItem", "GetItem", "DictGetItem"):
        return value[key]
    if isinstance(value, type) and kind == "GetAttr" and type(value) in (type, ABCMeta):
        facts.steps.append(("class", value, None, None))
        found = next((vars(one)[attribute] for one in value.__mro__ if attribute in vars(one)), None)
        is_own = isinstance(found, FunctionType) and not hasattr(type(vars(type).get(attribute)), "__set__")
        if is_own or attribute == "__name__":
            return getattr(value, attribute)
    if type(value) is property and attribute == "fget":
        return value.fget
    if _has_dict(value) and (kind == "GetGenericDict" or (is_generic and attribute == "__dict__")):
        facts.steps += entries_of(value)
        return value.__dict__
    if _has_dict(value) and kind == "Type":
        return type(value)
    if _has_dict(value) and (kind == "GetAttr" or is_generic):
        return attribute_of(value, attribute, facts.steps, is_generic=is_generic)
    raise LookupError


def _is_fixed(value: Any) -> bool:
    """Whether facts may hold an object itself: it is no data of the program."""
    kinds = FunctionType, BuiltinFunctionType, ModuleType, type
    return isinstance(value, kinds) or is_constant(value) or value is vars(builtins)


def _lacks_attributes(facts: Facts, node: Any, value: Any) -> bool:
    """Adds facts from which it follows that an object has none of the attributes that guards look for."""
    text = re.compile(re.escape(f"not hasattr({node.get_source()}, ") + r"'(\w+)'\)")
    for guard in node.get_leaf_guards():
        if type(guard).__name__ == "NO_HASATTR":
            found = text.match(guard.verbose_code_parts()[0])
            try:
                if found is not None:
                    attribute_of(value, found[1], facts.steps)
                return False
            except LookupError:
                return False
            except Absent:
                pass
    return True


def _items(node: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """The key of each item, or None if it is not plain, and the item's node; also the nodes of keys that are not."""
    for accessor, child in _children(node):
        key = _key_of(accessor)
        has = key in value if type(value) is dict else type(key) is int and 0 <= key < len(value)
        yield key if has and type(key) in (str, int) else None, child
    if hasattr(node, "get_key_value_managers"):
        keys = list(value)
        for index, (of_key, of_value) in node.get_key_value_managers().items():
            key = keys[index] if index < len(keys) and type(keys[index]) in (str, int) else None
            if of_key is not None and (key is None or not _leaves(of_key) <= _OF_CONSTANT):
                key = None
                yield None, of_key
            if of_value is not None:
                yield key, of_value


def _visit_items(facts: Facts, node: Any, value: dict[Any, Any]) -> bool:
    is_covered = True
    for key, child in _items(node, value):
        if key is None:
            _keep(facts, child)
        is_covered &= key is not None and _visit(facts, child, value[key])
    return is_covered


def _keep(facts: Facts, node: Any) -> None:
    facts.kept.update(child.get_source() for child in _nodes(node))


def _has_dict(value: Any) -> bool:
    """Whether its attributes are in a dictionary, and it is neither a class, a module of Python nor a function."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType, torch.Tensor, dict)):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def _key_of(accessor: Any) -> Any:
    """The key with which an accessor looks up an item; None for other accessors."""
    found = re.fullmatch(r"(?:Dict|Tuple|List|)GetItemGuardAccessor\((.*)\)", accessor.repr(), re.DOTALL)
    try:
        return ast.literal_eval(found[1]) if found else None
    except (SyntaxError, ValueError):
        return None


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    return zip(node.get_accessors(), node.get_child_managers(), strict=True)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    pairs = node.get_key_value_managers().values() if hasattr(node, "get_key_value_managers") else ()
    for child in (*node.get_child_managers(), *(part for pair in pairs for part in pair if part is not None)):
        yield from _nodes(child)


def _leaves(node: Any) -> set[str]:
    return set(_names(node.get_leaf_guards()))


def _names(guards: Any) -> list[str]:
    return [type(guard).__name__ for guard in guards]
