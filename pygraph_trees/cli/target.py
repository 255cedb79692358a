"""Turns a TARGET, given as text, into a :class:`~.benchmark.program.Program`.

A target is ``file.py:function``, ``package.module:function`` or a workload of ``tools/bench``. The function returns a
program's parts (:func:`program_of`), and may take ``device``: ``meta`` represents the GPU in ``explain``. :func:`check`
needs no torch, and neither does the import of this file.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pygraph_trees.errors import PygraphError

if TYPE_CHECKING:
    import torch

    from pygraph_trees.benchmark.program import Program

DEFAULT = f"{__name__}:bert"
_VOCABULARY = 384  # the 256 bytes and 128 special tokens, as ByT5's
_WORKLOADS = Path(__file__).resolve().parents[2] / "tools" / "bench" / "workloads" / "__init__.py"
_ADD_DEVICE = "add a parameter `device` to the function, and build for it"
_MOST_TEXT = 300  # characters of an error's text
# Not resolved: frames name files as they were imported, which may be through a link.
_PACKAGE = str(Path(__file__).parent.parent)
_MAKING = r"import \*|globals|exec|vars|setattr|modules|__getattr__"  # of a file that may make functions while it runs


class TargetError(PygraphError):
    """The target cannot be built or run; the exception that the program raised is the cause."""

    template = "target {target!r}: {problem}"


class TargetFormError(TargetError):
    """The text is no target, or the function does not return a program."""

    template = (
        "target {target!r}: {problem}. A target is file.py:function, package.module:function (returning (model, args), "
        "(model, args, kwargs) or (model, args, kwargs, loss)), or a workload{workloads}."
    )

    def __init__(self, target: str, problem: str) -> None:
        names = ", ".join(sorted(workloads()))
        super().__init__(target=target, problem=problem, workloads=f" ({names})" if names else " of a checkout")


class OnCpuError(PygraphError):
    """The program failed, and its inputs and its parameters are on different devices."""

    template = "{found}; put the {left} on device='meta', which stands for the GPU"
    found: str


class TransformersMissing(PygraphError):
    template = "the default target needs transformers ({why}): pip install transformers"


def bert(device: torch.device | str = "cuda") -> tuple[torch.nn.Module, tuple[()], dict[str, Any]]:
    """The default target: transformers' BERT with a head for masked words, of base size, in bfloat16."""
    import torch

    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:
        raise TransformersMissing(why=error) from error

    torch.manual_seed(0)
    with torch.device(device):
        model = BertForMaskedLM(BertConfig(vocab_size=_VOCABULARY)).to(torch.bfloat16).eval()
    tokens = torch.randint(_VOCABULARY, (4, 256)).to(device)
    return model, (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def check(target: str) -> None:
    """Raises if a target names no function, or a file or a function that is not there; runs nothing of it."""
    place, _, name = target.rpartition(":")
    if not place and target.endswith(".py"):
        raise TargetError(target=target, problem=f"it names no function; add one, as in {target}:build")
    if not place.endswith(".py"):
        return
    if not Path(place).is_file():
        raise TargetError(target=target, problem=f"there is no file {place}")
    with raising_errors_of(target):
        code = Path(place).read_bytes()
        compile(code, place, "exec", dont_inherit=True)
    text = code.decode(errors="replace")
    if not re.search(rf"\b{re.escape(name)}\b|{_MAKING}", text):
        raise _missing(target, place, name, re.findall(r"^def (\w+)", text, re.M))


def _missing(target: str, place: str, name: str, names: list[str]) -> TargetError:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return TargetError(target=target, problem=f"{place} has no function {name!r}{hint}")


def resolve(target: str, device: torch.device) -> Program:
    """Builds the program that ``target`` names, or :data:`DEFAULT` if it is empty, for ``device``."""
    target = target or DEFAULT
    check(target)
    if ":" not in target:
        if (workload := workloads().get(target)) is None:
            if near := difflib.get_close_matches(target.upper(), workloads(), n=1):
                raise TargetError(target=target, problem=f"no such workload; did you mean {near[0]}?")
            raise TargetFormError(target, "no such workload")
        with raising_errors_of(target):
            return workload.build(device)
    place, name = target.rsplit(":", 1)
    with raising_errors_of(target):
        module = _module(target, place)
    if not callable(function := getattr(module, name, None)):
        raise _missing(target, place, name, [n for n, v in vars(module).items() if callable(v)])
    with raising_errors_of(target):
        made = _call(target, function, device)
    if (program := program_of(made, name)) is None:
        shape = type(made).__name__
        if isinstance(made, tuple):
            shape = f"a tuple of {', '.join(type(m).__name__ for m in made)}"
        is_model_first = isinstance(made, tuple) and 2 <= len(made) <= 4 and callable(made[0])
        hint = "; args must be a tuple" if is_model_first and not isinstance(made[1], (tuple, list)) else ""
        raise TargetFormError(target, f"it returned {shape}{hint}")
    return program


def program_of(made: Any, name: str) -> Program | None:
    """The program that a target's function returned; None if it returned none.

    Args:
        made: a :class:`Program`, ``(model, args)``, ``(model, args, kwargs)`` or ``(model, args, kwargs, loss)``. A
            module in training mode, or one with a loss, is trained: forward, loss and backward. ``loss`` makes a scalar
            of the outputs; without it the outputs' ``loss`` is taken, or their sum. A function that uses a module in
            training mode is itself a step, and computes its gradients itself. All others run without gradients.
    """
    import torch

    from pygraph_trees.benchmark.program import Program, default_loss
    from pygraph_trees.fake_gpu.tracing import modules_of

    if isinstance(made, Program):
        return made
    if not (
        isinstance(made, tuple) and 2 <= len(made) <= 4 and callable(made[0]) and isinstance(made[1], (tuple, list))
    ):
        return None
    fn, args = made[:2]
    kwargs: Any = made[2] if len(made) > 2 else {}
    loss: Any = made[3] if len(made) > 3 else None
    if not isinstance(kwargs, Mapping) or not (loss is None or callable(loss)):
        return None
    parts: dict[str, Any] = {"fn": fn, "args": tuple(args), "kwargs": kwargs, "name": name}
    if loss is not None or (isinstance(fn, torch.nn.Module) and _is_trained(fn)):
        return Program(**parts, training=True, loss=default_loss if loss is None else loss)
    if not isinstance(fn, torch.nn.Module) and any(map(_is_trained, modules_of(fn))):
        return Program(**parts, is_step=True)
    return Program(**parts, context=torch.no_grad)


def _is_trained(module: torch.nn.Module) -> bool:
    return module.training and any(parameter.requires_grad for parameter in module.parameters())


@contextlib.contextmanager
def raising_errors_of(target: str) -> Iterator[None]:
    """Turns exceptions of the target's code into a :class:`TargetError` with one line of text."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, PygraphError) and not isinstance(error, OnCpuError):
            raise
        raise TargetError(target=target, problem=_problem(error)) from error


def _problem(error: BaseException) -> str:
    if isinstance(error, OnCpuError):
        return f"{error.found}; {_ADD_DEVICE}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno} is not valid Python: {error.msg}"
    if isinstance(error, SystemExit):  # a script, which may also have refused our command line
        return f"it calls sys.exit({error.code!r}); do this under if __name__ == '__main__'"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:  # None: raised by one that looks for others
        if "." in error.name:  # the package is there
            return f"there is no module {error.name}"
        return f"it needs the package {error.name}, which is not installed: pip install {error.name}"
    import torch

    from pygraph_trees.report.naming import FRAME

    root = error
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # Dynamo raises it for what the program raised
        while (earlier := root.__cause__ or root.__context__) is not None:
            root = earlier
    frames = traceback.extract_tb(root.__traceback__)
    places: list[tuple[Any, ...]]
    places = [(f.filename, f.lineno, f.name) for f in (*traceback.extract_tb(error.__traceback__), *frames)]
    # Dynamo names the lines of the program in the text.
    places += [m.group("file", "line", "function") for m in map(FRAME.match, str(error).splitlines()) if m]
    # The files of the program are those that are neither torch's nor this package's.
    own = [place for place in places if not place[0].startswith((str(Path(torch.__file__).parent), _PACKAGE, "<"))]
    place = "{}:{} in {}".format(*own[-1]) if own else None
    if frames and frames[-1].name == "_lazy_init" and not torch.cuda.is_available():
        return f"it uses a GPU{f' at {place}' if place else ''}, and torch finds none; {_ADD_DEVICE}"
    first = next((line.strip() for line in str(root).splitlines() if line.strip()), "")
    shown = first if len(first) <= _MOST_TEXT else first[: _MOST_TEXT - 3] + "..."
    return f"{type(root).__name__}: {shown}" + (f" ({place})" if place else "")


def workloads() -> Mapping[str, Any]:
    """The workloads by name; none if the package is installed without its checkout."""
    if not _WORKLOADS.exists():
        return {}
    module = sys.modules.get("pygraph_bench_workloads") or _load("pygraph_bench_workloads", _WORKLOADS)
    return module.WORKLOADS


def _module(target: str, place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours, as a script can
        # A name of its own, so that a file named like a loaded module, such as random.py, does not replace it. Without
        # dots: pickle finds the module by its name.
        return _load(f"pygraph_target_{path.stem.replace('.', '_')}", path)
    if Path(place).is_file():
        raise TargetFormError(target, f"{place} is not a .py file")
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetFormError(target, f"{place!r} is neither a .py file nor the name of a module")
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (place == missing.name or place.startswith(missing.name + ".")):
            raise TargetFormError(target, f"there is no module {place}") from missing
        raise
    finally:
        sys.path.remove("")


def _load(name: str, path: Path) -> ModuleType:
    locations = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _call(target: str, function: Callable[..., Any], device: torch.device) -> Any:
    parameters = inspect.signature(function).parameters
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if set(required) - {"device"}:
        raise TargetFormError(target, f"it needs arguments ({', '.join(required)}), only `device` is given")
    return function(device=device) if "device" in parameters else function()
