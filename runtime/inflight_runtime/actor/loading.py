"""Turns a job's ``environment`` block into an environment object, or says in plain words why it cannot."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from inflight_runtime.actor.environments import Environment
from inflight_runtime.config.roles import EnvironmentSpec


class EnvironmentLoadError(ValueError):
    """The job's environment cannot be used; the message names the field, the reason and the remedy."""


def load_environment(spec: EnvironmentSpec) -> Environment:
    """Import ``module:Class`` and construct it with the job's arguments.

    ``spec.search_path`` goes to the front of ``sys.path`` and stays there, so that the environment's own late imports
    work too.

    Raises:
        EnvironmentLoadError: it cannot be imported or constructed, or offers no problems.
    """
    module_name, _, class_name = spec.entrypoint.partition(":")
    if not module_name or not class_name or ":" in class_name:
        raise EnvironmentLoadError(
            f"environment.entrypoint {spec.entrypoint!r}: expected 'module:Class', for instance 'my_task:MyTask'"
        )
    for directory in reversed(spec.search_path):
        if directory in sys.path:
            sys.path.remove(directory)
        sys.path.insert(0, directory)
    cls = _find_class(_import(module_name, spec), class_name, spec.entrypoint)
    environment = _construct(cls, spec)
    if environment.problems is None and type(environment).problem is Environment.problem:
        raise EnvironmentLoadError(
            f"environment.entrypoint {spec.entrypoint!r}: {cls.__name__} offers no problems: "
            "set self.problems in its constructor, or override problem(index)"
        )
    if environment.problems is not None and len(environment.problems) == 0:
        raise EnvironmentLoadError(f"environment.entrypoint {spec.entrypoint!r}: {cls.__name__}.problems is empty")
    return environment


def describe_error(error: BaseException) -> str:
    """Put an exception into one line: type, message, and where in the user's code it was raised."""
    text = " ".join(str(error).split()) or "(no message)"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "inflight_runtime" not in frame.filename]
    # The innermost frame outside of our code and of installed libraries is the one that the user can mend.
    users = [frame for frame in own if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    chosen = users or own
    where = f" ({Path(chosen[-1].filename).name}:{chosen[-1].lineno} in {chosen[-1].name})" if chosen else ""
    return f"{type(error).__name__}: {text[:500]}{where}"


def _import(module_name: str, spec: EnvironmentSpec) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            looked = ", ".join(spec.search_path) or "the installed packages"
            raise EnvironmentLoadError(
                f"environment.entrypoint {spec.entrypoint!r}: there is no module {error.name!r} (looked in {looked}); "
                "put the file beside the job file, or install its package"
            ) from error
        raise EnvironmentLoadError(
            f"environment.entrypoint {spec.entrypoint!r}: importing {module_name!r} failed because it needs "
            f"{error.name!r}, which is not installed"
        ) from error
    except SyntaxError as error:
        raise EnvironmentLoadError(
            f"environment.entrypoint {spec.entrypoint!r}: {error.filename}:{error.lineno}: syntax error: {error.msg}"
        ) from error
    except Exception as error:
        raise EnvironmentLoadError(
            f"environment.entrypoint {spec.entrypoint!r}: importing {module_name!r} raised {describe_error(error)}"
        ) from error


def _find_class(module: ModuleType, class_name: str, entrypoint: str) -> type[Environment]:
    found = getattr(module, class_name, None)
    if found is None:
        offered = [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        hint = f"it has {', '.join(offered)}" if offered else "it has no environment class"
        raise EnvironmentLoadError(
            f"environment.entrypoint {entrypoint!r}: module {module.__name__!r} ({module.__file__}) has no class "
            f"{class_name!r}; {hint}"
        )
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise EnvironmentLoadError(
            f"environment.entrypoint {entrypoint!r}: {class_name} is not an environment class; derive it from "
            "inflight_runtime.actor.SingleTurnEnvironment or inflight_runtime.actor.Environment"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentLoadError(
            f"environment.entrypoint {entrypoint!r}: {class_name} does not implement {', '.join(missing)}"
        )
    return found


def _construct(cls: type[Environment], spec: EnvironmentSpec) -> Environment:
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in spec.args:
            if name not in parameters:
                near = get_close_matches(name, parameters, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(parameters) or 'no arguments'}"
                raise EnvironmentLoadError(f"environment.args.{name}: {cls.__name__} has no such argument; {hint}")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in spec.args
    ]
    if missing:
        raise EnvironmentLoadError(f"environment.args: {cls.__name__} needs {', '.join(missing)}")
    arguments: dict[str, Any] = dict(spec.args)
    try:
        return cls(**arguments)
    except Exception as error:
        raise EnvironmentLoadError(
            f"environment {spec.entrypoint!r} with args {arguments!r} raised {describe_error(error)}"
        ) from error
