"""The ``inflight`` command.

Imports neither torch nor an engine, and what only one command needs is imported there: ``inflight validate`` answers
at once.
"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rich.console import Console

    from inflight_runtime.local.result import RunResult
    from inflight_runtime.target import Cluster
    from inflight_runtime.terminal import PrefixedLines

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
StatusTarget = Annotated[
    str | None, typer.Argument(metavar="RUN_DIR|rltj[/NAME]", help="What to look at.", show_default=False)
]
LogsTarget = Annotated[str | None, typer.Argument(metavar="RUN_DIR|rltj/NAME", help="Whose logs.", show_default=False)]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Of a job in a cluster. Default: the context's.", show_default=False)
]
Context = Annotated[
    str, typer.Option(metavar="NAME", help="Of your kubeconfig. Default: the current one.", show_default=False)
]
Kubeconfig = Annotated[
    str,
    typer.Option(metavar="FILE", help="Default: $KUBECONFIG, else ~/.kube/config.", show_default=False),
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
def status(
    target: StatusTarget = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the run is over.")] = False,
    namespace: Namespace = "",
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="All jobs of a cluster.")] = False,
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Show how a run stands: one on this machine, or a job in a cluster.

    RUN_DIR is a local run (default runs/latest). rltj/NAME is a job in the cluster of your kubeconfig, rltj all jobs of
    the namespace; with -n, -A, --context or --kubeconfig a plain NAME is a job too. With --watch the exit code is 0
    when the run has succeeded and 1 when it has not.
    """
    from rich.console import Console  # noqa: PLC0415

    from inflight_runtime.target import Cluster  # noqa: PLC0415

    cluster = Cluster(kubeconfig, context, namespace, all_namespaces)
    job = _job_in_cluster(target, cluster)
    console = Console()
    if job is not None:
        raise typer.Exit(_in_cluster(lambda: _cluster_status(cluster, job, console, watch=watch)))

    from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError  # noqa: PLC0415
    from inflight_runtime.local.status import render_status  # noqa: PLC0415

    directory = RunDirectory(Path(target or LATEST))
    try:
        if not watch:
            console.print(render_status(directory), soft_wrap=True)  # paths stay whole
            return
        from inflight_runtime.local.watching import watch_status  # noqa: PLC0415

        code = watch_status(directory, console)
    except RunDirectoryError as error:
        _refuse_run_dir(error, target, "status")
    raise typer.Exit(code)


@app.command()
def logs(
    target: LogsTarget = None,
    role: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLE", help="coordinator, inference, actor, trainer; or inference-0.", show_default=False
        ),
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    tail: Annotated[int, typer.Option(min=-1, help="Lines of each process to begin with; -1 for all.")] = 100,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Of containers before their last restart (cluster only).")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Show the logs of a run's processes side by side: of a local run, or of a job's pods in a cluster.

    RUN_DIR, rltj/NAME and NAME are as for inflight status. Without RUN_DIR a ROLE alone is enough.
    """
    from rich.console import Console  # noqa: PLC0415

    from inflight_runtime.api import JobError, Problem  # noqa: PLC0415
    from inflight_runtime.target import Cluster  # noqa: PLC0415
    from inflight_runtime.terminal import PrefixedLines  # noqa: PLC0415

    cluster = Cluster(kubeconfig, context, namespace)
    job = _job_in_cluster(target, cluster)
    lines = None if tail < 0 else tail
    out = PrefixedLines(Console())
    if previous and (job is None or follow):
        other = "is for a job in a cluster; a local log holds all starts" if job is None else "excludes --follow"
        refuse(JobError([Problem("--previous", None, other, "remove it")]))
    if job is not None:
        raise typer.Exit(_in_cluster(lambda: _cluster_logs(cluster, (job, role or "", lines, previous), out, follow)))

    from inflight_runtime.local.printing import show_logs  # noqa: PLC0415
    from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError  # noqa: PLC0415

    if target is not None and role is None and not Path(target).exists() and RunDirectory(LATEST).path.exists():
        target, role = None, target
    try:
        code = show_logs(RunDirectory(Path(target or LATEST)), role or "", out, tail=lines, follow=follow)
    except RunDirectoryError as error:
        _refuse_run_dir(error, target, "logs")
    raise typer.Exit(code)


def _job_in_cluster(target: str | None, cluster: "Cluster") -> str | None:
    from inflight_runtime.target import TargetError, job_in_cluster  # noqa: PLC0415

    try:
        return job_in_cluster(target, cluster)
    except TargetError as error:
        refuse(error)


def _in_cluster(begin: "Callable[[], Coroutine[Any, Any, int]]") -> int:
    """Run what asks a cluster; its exit code."""
    import asyncio  # noqa: PLC0415

    try:
        from inflight_runtime.cluster.connection import ClusterError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "inflight_runtime"):
            raise
        words = f"the Python package {package} is not installed here; for jobs in a cluster install this"
        refuse(ModuleNotFoundError(f"{words} project with its extra: pip install '.[cluster]'"))
    try:
        return asyncio.run(begin())
    except ClusterError as error:
        refuse(error)


async def _cluster_status(cluster: "Cluster", job: str, console: "Console", *, watch: bool) -> int:
    from inflight_runtime.cluster.status import show_status  # noqa: PLC0415

    return await show_status(cluster, job, console, watch=watch)


async def _cluster_logs(
    cluster: "Cluster", wanted: tuple[str, str, int | None, bool], out: "PrefixedLines", follow: bool
) -> int:
    from inflight_runtime.cluster.logs import Request, show_logs  # noqa: PLC0415

    return await show_logs(cluster, Request(*wanted), out, lambda text: typer.echo(text, err=True), follow=follow)


def _refuse_run_dir(error: Exception, target: str | None, command: str) -> NoReturn:
    from inflight_runtime.target import looks_like_a_job  # noqa: PLC0415

    hint = ""
    if target is not None and looks_like_a_job(target) and not Path(target).exists():
        hint = f"; a job in a cluster: inflight {command} rltj/{target}"
    refuse(type(error)(f"{error}{hint}"))


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
