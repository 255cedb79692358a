"""Lets calls of compiled functions go straight to the code that Dynamo made, if all is as it was when its guards held.

:func:`entering` wraps the method with which ``torch.compile`` makes a function. With ``pygraph_entry`` "check" or
"direct", C++ answers calls of that function (``native/direct_calls.cpp``), and torch all others. After one of those,
:func:`_learn` may make a memo: the code, and what its guards read. Under "check", Dynamo's guards also run at every
64th such call, and :class:`GuardsDiffer` is raised if they fail.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections import Counter
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo import config, eval_frame
from torch._dynamo.convert_frame import output_codes
from torch._dynamo.mutation_guard import GenerationTracker
from torch._guards import _TLS, TracingContext
from torch.autograd import profiler
from torch.fx import _symbolic_trace
from torch.nn.modules import module as modules

from pygraph_trees.compat import dynamic_mark, marks_traces_by_thread
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.settings import Settings

from ..pools.collector import paused
from .gathering import GuardsDiffer, locals_of, noting_call
from .guard_facts import Refused, Step, cloned, facts_of, single

CHECK_EVERY = 64  # of the calls without guards one is checked, under "check"; so are that many at first

_ATTRIBUTE = "pygraph_direct"
_WRAPPER = "compile_wrapper"
_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
# What runs around a call of torch's and changes no call that compiles nothing.
_HARMLESS = ("OptimizeContext.__init__.<locals>.on_enter", "call_on_enter", "_make_closure_patcher.<locals>.change")

# Since torch 2.14, guards that compare objects are by default not last, and then do not work in a clone.
_compare_last: Any = config._make_closure_patcher(use_lamba_guard_for_object_aliasing=True)
_MODULE_CALL: Any = eval_frame.OptimizedModule.__call__

_log = logging.getLogger("pygraph_trees.trees")
_frames = torch._C._dynamo.eval_frame
_entered: WeakKeyDictionary[Callable[..., Any], tuple[Any, str]] = WeakKeyDictionary()  # with backend and mode
_refusals: dict[Why, Any] = {}  # from the reason to a Counter of calls
_tested = 0  # calls of the self-test


def offer(put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Lets functions be entered directly that are made from now on, or were before, until the result is called."""
    if binding.extension is None:
        return lambda: None
    undo = put_on()
    for function, how in list(_entered.items()):
        if _ATTRIBUTE not in vars(function):
            enter(function, *how)

    def withdraw() -> None:
        undo()
        binding.extension.enter_directly(_MODULE_CALL, False, True)
        for function in list(_entered):
            _leave(function)

    return withdraw


def _leave(function: Callable[..., Any]) -> None:
    binding.extension.enter_directly(function, False)
    vars(function).pop(_ATTRIBUTE, None)


def entering(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def __call__(self: Any, fn: Any) -> Any:
        made = upstream(self, fn)
        mode = _mode(self)
        if mode is not None and isinstance(made, FunctionType) and made.__code__.co_name == _WRAPPER:
            if not config.use_lamba_guard_for_object_aliasing and _compare_last not in self.enter_exit_hooks:
                self.enter_exit_hooks.append(_compare_last)
            enter(made, eval_frame.innermost_backend(self.callback), mode)
        return made

    return __call__


def _mode(context: Any) -> str | None:
    """The flag, for a function that asks for CUDA graphs and that no code of a backend surrounds; None otherwise."""
    if type(context) is not eval_frame.OptimizeContext or context.export:
        return None
    backend = eval_frame.innermost_backend(context.callback)
    if not isinstance(backend, torch._TorchCompileInductorWrapper):
        return None
    from torch._inductor import config as inductor_config

    options = backend.config
    is_graphed = options.get("triton.cudagraphs", inductor_config.triton.cudagraphs)
    mode: str = options.get("triton.pygraph_entry", Settings.current().entry)
    hooks = (getattr(hook, "__qualname__", "") for hook in context.enter_exit_hooks)
    is_plain = getattr(context, "_isolate_recompiles_id", -1) == -1 and all(hook.endswith(_HARMLESS) for hook in hooks)
    # Without some guards, an input may change unseen.
    is_plain &= getattr(getattr(context.callback, "hooks", None), "guard_filter_fn", None) is None
    return mode if mode in ("check", "direct") and is_graphed and is_plain and _is_as_expected() else None


def enter(made: Any, backend: Any, mode: str) -> None:
    """Lets calls of torch's function around a compiled one be answered without Dynamo."""
    torchs = FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, made.__closure__)
    vars(made)[_ATTRIBUTE] = binding.extension.Direct(
        learn=functools.partial(_learn, made._torchdynamo_orig_callable, torchs, backend),
        verify=_verify,
        every=CHECK_EVERY if mode == "check" else 0,
    )
    binding.extension.enter_directly(made, True)
    binding.extension.enter_directly(_MODULE_CALL, True, True)
    _entered[made] = backend, mode


def counts() -> tuple[int, dict[Why, int]]:
    """How many calls were made without Dynamo; how many were torch's, by reason."""
    if binding.extension is None:
        return 0, {}
    taken, first, changed, arguments, guard, _, inside, busy = binding.extension.counted_direct_calls()
    found = Counter({why: counter.value for why, counter in _refusals.items()})
    found += Counter({Reason.DIRECT_FIRST(): first - _tested, Reason.DIRECT_CHANGED(): changed})
    found += Counter({Reason.DIRECT_ARGUMENTS(): arguments, Reason.DIRECT_GUARD(): guard})
    found += Counter({Reason.DIRECT_INSIDE(): inside, Reason.DIRECT_BUSY(): busy})
    return taken, dict(found)


def _learn(
    fn: Any, torchs: FunctionType, backend: Any, direct: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A memo of a call that torch has just made; None if there can be none; ``direct`` then has the reason."""
    try:
        with paused():  # as in _verify
            memo, call = _memo(fn, backend, direct, args, kwargs)
        memo.gather([], functools.partial(_first_call, direct, memo, torchs, call))
        direct.refusal = None
        return memo
    except Refused as refused:
        (why,) = refused.args
    except Exception:
        _log.debug("no memo of %s", fn, exc_info=True)
        why = Reason.ERROR()
    direct.refusal = _refusals.setdefault(why, binding.new_counter())
    return None


def _memo(fn: Any, backend: Any, direct: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """A memo, and what to call next."""
    steps = _settings()
    target, own, more = _target(fn)
    steps += more
    _bind(direct, target, own)
    local_variables = locals_of(direct, args if own is None else (own, *args), kwargs)
    entry = _entry(target.__code__, backend, local_variables)
    guards, code = entry.guard_manager, entry.code
    if guards.global_scope["G"] is not target.__globals__:  # of another function with the same code
        raise Refused(Reason.CALLED_OTHERWISE())
    # None once torch has dropped the entry.
    steps += [("object", guards, vars(guards), None), ("item", vars(guards), "cache_entry", guards.cache_entry)]
    function = _function(target, code)
    # Objects in modules may change at each call. Then two memos are soon of no use, and later ones leave them out.
    free, reads_modules = target.__code__.co_freevars, len(direct.memos) < 2
    facts = facts_of(guards.root, local_variables, target.__globals__, free, reads_modules=reads_modules)
    clone = cloned(guards.root, facts)
    leaves = None if torch._C._autograd._top_saved_tensors_default_hooks(True) else single(clone, facts)
    steps += facts.steps
    memo = binding.extension.Memo(
        function=function,
        check=clone.check if leaves is None else None,
        leaves=leaves or [],
        guards=guards,
        kept=(
            clone,  # guards may point to it
            leaves,
            [variable[1:3] for variable in facts.variables],
            [_held(*step) for step in steps],
            target.__code__,
        ),
        steps=steps,
        variables=facts.variables,
    )
    if not (guards.check(local_variables) and clone.check(local_variables)):
        raise Refused(Reason.DIRECT_GUARD())
    if not memo.holds(local_variables, target.__globals__):  # a tensor is given twice
        raise Refused(Reason.DIRECT_ARGUMENTS())
    names = [variable[:3] for variable in facts.variables]
    return memo, functools.partial(noting_call, direct, memo, function, names)


def _held(kind: str, value: Any, *of_kind: Any) -> Any:
    """What must live as long as a memo, so that its address is not used again."""
    own: tuple[Any, ...] = (value.__name__,) if kind == "class" else ()
    if kind == "function":
        own = value, value.__code__, value.__defaults__, value.__name__
    return type(value), own, of_kind if kind in ("item", "cell") else of_kind[: kind in ("borrowed", "entry")]


def _settings() -> list[Step]:
    """Facts on variables of torch that decide how it treats all calls."""
    stance = eval_frame._stance
    if stance.stance != "default" or stance.backend is not None or stance.skip_guard_eval_unsafe:
        raise Refused(Reason.STANCE())
    switches = {profiler: "_is_profiler_enabled", torch.compiler: "_is_exporting_flag"}
    steps: list[Step] = [("item", vars(eval_frame), "_stance", stance)]
    if marks_traces_by_thread():  # while FX traces, this class has other methods; later it has another version
        steps.append(("class", torch.nn.Module, None, None))
    else:
        switches[_symbolic_trace] = "_is_fx_tracing_flag"
    is_inside = TracingContext.try_get() is not None or _symbolic_trace.is_fx_symbolic_tracing()
    if is_inside or any(vars(place)[name] is not False for place, name in switches.items()):
        raise Refused(Reason.DIRECT_INSIDE())
    return [*steps, *(("item", vars(place), name, False) for place, name in switches.items())]


def _target(fn: Any) -> tuple[FunctionType, Any, list[Step]]:
    """The function that Dynamo compiles, the object of a method, and facts on how it is reached."""
    if isinstance(fn, FunctionType):
        return fn, None, [("function", fn, None, None)]
    if not isinstance(fn, MethodType) or not isinstance(fn.__func__, FunctionType):
        raise Refused(Reason.CALLED_OTHERWISE())
    own: Any = fn.__self__
    function = fn.__func__
    if function is not torch.nn.Module._wrapped_call_impl:
        return function, own, [("function", function, None, None)]
    forward, calls = own.forward, getattr(own._call_impl, "__func__", None)
    is_plain = isinstance(forward, MethodType) and forward.__self__ is own
    is_plain = is_plain and isinstance(forward.__func__, FunctionType) and calls is torch.nn.Module._call_impl
    if not is_plain or own._compiled_call_impl is not None:
        raise Refused(Reason.CALLED_OTHERWISE())
    of_all = [("item", vars(modules), f"_global{name}", getattr(modules, f"_global{name}")) for name in _HOOKS]
    hooks = [*(getattr(own, name) for name in _HOOKS), *(item[3] for item in of_all)]
    if any(hooks):
        raise Refused(Reason.MODULE_HOOKED())
    facts = [
        ("object", own, own.__dict__, None),
        ("dict", own.__dict__, None, None),
        ("class", type(own), None, None),
        ("function", torch.nn.Module._call_impl, None, None),
        ("function", forward.__func__, None, None),
        *of_all,
        *(("empty", hook, None, None) for hook in hooks),
    ]
    return forward.__func__, own, facts


def _bind(direct: Any, target: FunctionType, own: Any) -> None:
    """Gives C++ the target, and a function that returns its variables, by name, for the arguments of a call."""
    found: Any = direct.bind
    as_is = (target, target.__code__, target.__defaults__, target.__kwdefaults__)
    if found is None or not all(map(operator.is_, found.of, as_is)) or direct.self is not own:
        direct.memos.clear()
        # Without the attributes of the program's, which may name another signature.
        bare = FunctionType(target.__code__, {}, target.__name__, target.__defaults__, target.__closure__)
        bare.__kwdefaults__ = target.__kwdefaults__
        empty, names = inspect.Parameter.empty, inspect.signature(bare).parameters
        plain = [p.replace(annotation=empty, default=empty if p.default is empty else None) for p in names.values()]
        scope: dict[str, Any] = {"_locals_": locals}  # a parameter may have the usual name
        exec(f"def bind{inspect.Signature(plain)}: return _locals_()", scope)
        found = scope["bind"]
        found.__defaults__, found.__kwdefaults__ = target.__defaults__, target.__kwdefaults__
        found.of = as_is
        direct.target, direct.self, direct.bind = target, own, found


def _entry(code: Any, backend: Any, local_variables: dict[str, Any]) -> Any:
    """Dynamo's cache entry for a call with these variables."""
    if not _frames._debug_get_precompile_entries(code):
        for entry in eval_frame._debug_get_cache_entry_list(code):
            is_ours = entry.backend == backend and getattr(entry, "isolate_recompiles_id", -1) == -1
            if is_ours and entry.guard_manager.check(local_variables):
                return entry
    raise Refused(Reason.NO_ENTRY())


def _function(target: FunctionType, code: Any) -> FunctionType:
    of = target.__code__
    names = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_freevars")
    variadic, others = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS, inspect.CO_GENERATOR | inspect.CO_COROUTINE
    count = of.co_argcount + of.co_kwonlyargcount + (of.co_flags & variadic).bit_count()
    is_alike = all(getattr(of, name) == getattr(code, name) for name in names)
    is_alike &= of.co_flags & variadic == code.co_flags & (variadic | others | inspect.CO_ASYNC_GENERATOR)
    if not is_alike or of.co_varnames[:count] != code.co_varnames[:count]:
        raise Refused(Reason.CALLED_OTHERWISE())
    if any(name.startswith("__resume_at") for name in code.co_names):
        raise Refused(Reason.GRAPH_BREAKS())
    made = FunctionType(code, target.__globals__, target.__name__, target.__defaults__, target.__closure__)
    made.__kwdefaults__ = target.__kwdefaults__
    return made


def _first_call(direct: Any, memo: Any, torchs: FunctionType, call: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A memo's first call is torch's, and tells whether other compiled code runs inside of the memo's."""
    given = args if direct.self is None else args[1:]
    codes: dict[int, CodeType] = {}
    result, is_noted = binding.extension.call_noting_codes(codes, torchs, given, kwargs)
    if not is_noted:
        return result
    with paused():  # Dynamo does not see what a finalizer calls while Python's audit hooks run
        is_alone = sum(code in output_codes for code in codes.values()) == 1
    if is_alone:
        memo.gather([], call)
    else:
        direct.memos.clear()
        direct.refusal = _refusals.setdefault(Reason.GRAPH_BREAKS(), binding.new_counter())
    return result


def _verify(target: FunctionType, guards: Any, local_variables: dict[str, Any]) -> bool:
    with paused():  # Dynamo holds a lock, for which a finalizer that calls the function would wait forever
        entries = eval_frame._debug_get_cache_entry_list(target.__code__)
        if not (any(entry.guard_manager is guards for entry in entries) and guards.check(local_variables)):
            raise GuardsDiffer(name=target.__qualname__)
    return True


@functools.cache
def _is_as_expected() -> bool:
    """Gives C++ torch's functions, and checks that this Python shows changes of dictionaries and classes."""
    try:
        difference = _tested_difference()
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    if difference is not None:
        _log.warning("Dynamo's guards run at each call: %s", difference)
        _refusals[Reason.ENTRY_DIFFERS(error=difference)] = counter = binding.new_counter()
        counter.value = 1
    return difference is None


def _tested_difference() -> str | None:
    extension = binding.extension
    if not extension.HAS_VERSIONS:
        return "dictionaries of this Python have no versions"
    if not hasattr(torch._C._dynamo.guards.RootGuardManager, "clone_manager"):
        return "guards cannot be cloned"
    extension.know_dynamo(
        _ATTRIBUTE,
        _frames.get_eval_frame_callback,
        _frames.set_guard_complete_hook,
        _TLS,
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth,
        GenerationTracker,
        dynamic_mark(),
    )
    of_all = [hooks for name, hooks in vars(modules).items() if name.startswith("_global_") and isinstance(hooks, dict)]
    methods = {
        name: vars(torch.nn.Module)[name] for name in ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
    }
    if methods["__call__"] is methods["_wrapped_call_impl"]:  # no other code has replaced it
        extension.know_modules(eval_frame.OptimizedModule, torch.nn.Module, methods, of_all, [*_HOOKS])

    class Own:
        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

    def store(own: Any) -> None:
        for i in range(100):
            own.number = i

    changes: dict[str, Callable[[Any], Any]] = {
        "attributes": store,
        "items": lambda own: vars(own).update(number=1),
        "deletions": lambda own: delattr(own, "number"),
        "dictionaries": lambda own: setattr(own, "__dict__", dict(vars(own))),
        "classes": lambda own: setattr(Own, "number", 1),
        "objects' classes": lambda own: setattr(own, "__class__", type("Other", (Own,), {})),
    }
    for name, change in changes.items():
        own = Own()
        own.number = 0
        steps = [("object", own, vars(own), None), ("dict", vars(own), None, None), ("class", Own, None, None)]
        memo = extension.Memo(function=store, check=store, guards=None, kept=(), steps=steps, variables=[])
        before = memo.holds({}, {})
        change(own)
        if not before or memo.holds({}, {}):
            return f"changes of {name} are not seen"

    def called(*args: Any, **kwargs: Any) -> int:
        return len(args)

    vars(called)[_ATTRIBUTE] = extension.Direct(learn=lambda *_: None, verify=_verify, every=0)
    global _tested
    before = sum(extension.counted_direct_calls())
    for is_entered in (True, False):
        extension.enter_directly(called, is_entered)
        if any(called(*[i] * 3) != 3 for i in range(20)):  # Python 3.11 runs a function without a star itself
            return "a function returns something else"
    _tested = sum(extension.counted_direct_calls()) - before
    return None if _tested == 20 else f"{_tested} of 20 calls were entered"
