"""The ``inflight`` command.

Imports neither torch nor an engine, and what only one command needs is imported there: ``inflight validate`` answers
at once.
"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from inflight_runtime.local.result import RunResult

app = typer.Typer(
    name="inflight",
    help="Asynchronous RL post-training with in-flight weight updates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_BAD_INPUT = 2
LATEST = Path("runs/latest")

JobFile = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="An RLTrainingJob.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change one field, e.g. spec.algorithm.steps=100. Repeatable."),
]
RunDir = Annotated[Path, typer.Argument(metavar="[RUN_DIR]", help="A run's directory.")]


@app.command()
def run(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="[JOB.YAML]", help="An RLTrainingJob.", show_default=False)
    ] = None,
    *,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run.  [default: runs/<job>-<time>]", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Go on with a run that was stopped.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also on a terminal.")] = False,
    coordinator_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the coordinator (state, metrics).  [default: a free one]"),
    ] = None,
    ready_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds an inference server may take until it is ready.")
    ] = 300.0,
) -> None:
    """Train on this machine: coordinator, inference servers, actors and trainer as processes of their own."""
    import asyncio  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from inflight_runtime.api import JobError, Problem  # noqa: PLC0415
    from inflight_runtime.local.executor import Executor  # noqa: PLC0415
    from inflight_runtime.local.prepare import note_end, prepare_resume, prepare_run  # noqa: PLC0415
    from inflight_runtime.local.rundir import RunDirectoryError  # noqa: PLC0415
    from inflight_runtime.local.summary import render_summary  # noqa: PLC0415
    from inflight_runtime.local.text import shown  # noqa: PLC0415
    from inflight_runtime.local.view import make_view  # noqa: PLC0415

    if (job_file is None) == (resume is None):
        refuse(JobError([Problem("", None, "give either a job file or --resume", "type: inflight run job.yaml")]))
    if resume is not None and run_dir is not None:
        refuse(JobError([Problem("--run-dir", str(run_dir), "a resumed run keeps its directory", "remove it")]))
    try:
        if resume is not None:
            prepared = prepare_resume(resume, overrides or [], coordinator_port)
        else:
            assert job_file is not None
            prepared = prepare_run(job_file, overrides or [], run_dir, coordinator_port)
    except (JobError, RunDirectoryError) as error:
        refuse(error)
    console = Console()
    with make_view(console, plain=plain) as view:
        view.event(f"run directory: {shown(prepared.directory.path)}")

        async def execute() -> "RunResult":
            return await Executor(prepared, view, ready_timeout).run()

        result = asyncio.run(execute())
    note_end(prepared, result)
    console.print(render_summary(result, prepared.directory), soft_wrap=True)  # paths and commands stay whole
    raise typer.Exit(result.exit_code)


@app.command()
def validate(job_file: JobFile, overrides: Overrides = None) -> None:
    """Check a job as far as it can be checked on this machine, and start nothing."""
    from inflight_runtime.api import JobError  # noqa: PLC0415
    from inflight_runtime.local.prepare import checked_job  # noqa: PLC0415

    try:
        job, machine = checked_job(job_file, overrides or [], job_file.absolute().parent)
    except JobError as error:
        refuse(error)
    typer.echo(f"{job_file}: {job.name} is valid and can run on this machine ({machine.device})")


@app.command()
def render(
    job_file: JobFile,
    overrides: Overrides = None,
    role: Annotated[
        str | None, typer.Option(help="Only this process, e.g. trainer or inference-0.", show_default=False)
    ] = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="The objects that the operator makes of the job, without a cluster.")
    ] = False,
) -> None:
    """Print the role configs that a run of this job would get here, as JSON, or its objects in a cluster, as YAML.

    Ports are examples, and so are a job's uid and token.
    """
    import json  # noqa: PLC0415

    from inflight_runtime.api import JobError, Problem  # noqa: PLC0415
    from inflight_runtime.local.prepare import render_example  # noqa: PLC0415

    try:
        if kubernetes:
            typer.echo(_cluster_objects(job_file, overrides or [], role), nl=False)
            return
        configs = render_example(job_file, overrides or [])
        if role is not None and role not in configs:
            raise JobError([Problem("--role", role, "there is no such process", f"choose one of {', '.join(configs)}")])
    except JobError as error:
        refuse(error)
    typer.echo(json.dumps(configs if role is None else configs[role], indent=2))


def _cluster_objects(job_file: Path, overrides: list[str], role: str | None) -> str:
    """The YAML of a job's objects; settings come from the environment, as the operator's do."""
    import os  # noqa: PLC0415

    from inflight_operator.offline import render_children  # noqa: PLC0415
    from inflight_operator.settings import SettingsError, settings_from  # noqa: PLC0415
    from inflight_runtime.api import JobError, Problem  # noqa: PLC0415
    from inflight_runtime.local.overrides import load_with_overrides  # noqa: PLC0415

    if role is not None:
        raise JobError([Problem("--role", role, "excludes --kubernetes", "give one of the two")])
    try:
        settings = settings_from(os.environ)
    except SettingsError as error:
        raise JobError([Problem("", None, str(error), "mend or unset the variable")]) from error
    return render_children(load_with_overrides(job_file, overrides), settings)


@app.command()
def status(run_dir: RunDir = LATEST) -> None:
    """Show how a run stands: live while it goes on, else from what it wrote."""
    from rich.console import Console  # noqa: PLC0415

    from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError  # noqa: PLC0415
    from inflight_runtime.local.status import render_status  # noqa: PLC0415

    try:
        Console().print(render_status(RunDirectory(run_dir)))
    except RunDirectoryError as error:
        refuse(error)


@app.command()
def samples(
    run_dir: RunDir = LATEST,
    step: Annotated[int | None, typer.Option(min=1, help="Only of this step.", show_default=False)] = None,
    best: Annotated[bool, typer.Option("--best", help="Groups with the best answers.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Groups with the worst answers.")] = False,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many groups.")] = 3,
) -> None:
    """Read rollouts: each prompt, its answers by reward, and the weight versions that wrote them."""
    from rich.console import Console  # noqa: PLC0415

    from inflight_runtime.api import JobError, Problem  # noqa: PLC0415
    from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError, read_json_lines  # noqa: PLC0415
    from inflight_runtime.local.samples import choose, render_groups  # noqa: PLC0415

    if best and worst:
        refuse(JobError([Problem("--best", None, "excludes --worst", "give one of the two")]))
    directory = RunDirectory(run_dir)
    try:
        directory.read_record()
    except RunDirectoryError as error:
        refuse(error)
    records = read_json_lines(directory.rollouts)
    groups = choose(records, step=step, choice="best" if best else "worst" if worst else "newest", count=count)
    if not groups:
        at = "" if step is None else f" of step {step}"
        typer.echo(f"no rollouts{at} in {directory.rollouts} yet", err=True)
        raise typer.Exit(1)
    Console().print(render_groups(groups))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Take the options that stand before a command."""
    if version:
        import importlib.metadata  # noqa: PLC0415

        typer.echo(f"inflight {importlib.metadata.version('inflight')}")
        raise typer.Exit


def refuse(error: Exception) -> NoReturn:
    """End with exit code 2 and the error's own words."""
    from inflight_runtime.local.text import plain_text  # noqa: PLC0415

    typer.echo(f"inflight: {plain_text(str(error))}", err=True)
    raise typer.Exit(EXIT_BAD_INPUT)


def main() -> None:
    """Entry point of the ``inflight`` command."""
    # Until a run begins, whose executor takes signals itself: what is under way is cleaned up, without a traceback.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _leave)
    app()


def _leave(signum: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
