"""The command line: verbs, flags, exit codes and progress. No logic."""

import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from grader import doctor as doctor_checks
from grader import grade as pipeline
from grader import images as image_store
from grader import signature
from grader.assignment import manifest as manifests
from grader.errors import GraderError, UsageError
from grader.intake import url as links
from grader.job import Request
from grader.outcome import leave
from grader.report import render, terminal
from grader.settings import PROJECT_ROOT, Settings
from grader.store import Grading, read_record, write_folder

Language = Literal["en", "zh"]
_log = logging.getLogger("grader")


class TerminalProgress:
    """Phases as a spinner on standard error, which leaves standard output to data."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def phase(self, name: str) -> None:
        """Show which phase runs."""
        if not self._console.is_terminal:
            self._console.print(Text(f"{name} ..."))
            return
        self.done()
        self._status = self._console.status(Text(f"{name} ..."))
        self._status.start()

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(Text(text))

    def done(self) -> None:
        """Stop the spinner."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tinyinfinitrain-grader")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Grade a commit of the training camp's homework, and say what works, what does not, and why."""
    context.ensure_object(dict)["debug"] = debug


@cli.command()
@click.argument("url")
@click.option("--assignment", metavar="ID", help="Grade this one; the others in the tree are left alone.")
@click.option("--student", metavar="NAME", help="Whose submission it is.")
@click.option(
    "--runner",
    type=click.Choice(["docker", "local"]),
    default="docker",
    show_default=True,
    help="`local` does not isolate: only for code that you trust.",
)
@click.option("--gpus", type=click.IntRange(min=0), default=0, metavar="N", help="Whole GPUs to lease.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where to leave the record and the reports."
)
@click.option("--json", "as_json", is_flag=True, help="Print the records, one a line, and nothing else.")
@click.option("--fail-under", type=click.FloatRange(0, 100), metavar="PERCENT", help="Exit 1 below this share.")
@click.option("--server", metavar="URL", help="Hand in at a grading service instead of grading here.")
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True)
@click.option("--fresh", is_flag=True, help="Grade again even where a result of the same commit is kept.")
def submit(  # noqa: PLR0913, PLR0917 - one parameter a flag of the public contract
    url: str,
    assignment: str | None,
    student: str | None,
    runner: Literal["docker", "local"],
    gpus: int,
    out: Path | None,
    as_json: bool,
    fail_under: float | None,
    server: str | None,
    lang: Language,
    fresh: bool,
) -> None:
    """Grade the commit that URL names."""
    if server is not None:
        raise UsageError("this version cannot hand in at a server", "leave --server out to grade here")
    console = Console(stderr=True)
    progress = TerminalProgress(console)
    request = Request(
        link=url, assignment=assignment, student=student, runner=runner, gpus=gpus, language=lang, fresh=fresh
    )
    try:
        gradings = pipeline.grade(request, Settings(), progress)
    finally:
        progress.done()
    for grading in gradings:
        folder = leave(grading, out if len(gradings) == 1 else out and out / grading.record.assignment.id)
        if as_json:
            click.echo(grading.record.model_dump_json())
        else:
            terminal.show(grading.record, console, lang)
        console.print(Text(f"report: {folder / 'report.html'}", style="dim"))
    if any(below(grading, fail_under) for grading in gradings):
        raise SystemExit(1)


def below(grading: Grading, fail_under: float | None) -> bool:
    """Say whether a grading stays under a percentage of what this runner could award."""
    record = grading.record
    return fail_under is not None and record.score * 100 < fail_under * record.available


@cli.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def link(url: str, as_json: bool) -> None:
    """Say what a link names, without fetching anything."""
    settings = Settings()
    parsed = links.parse(url, hosts=settings.hosts)
    answer = {"repository": parsed.repository, "ref": parsed.ref, "verdict": str(parsed.verdict)}
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
    else:
        for name, value in answer.items():
            click.echo(f"{name:<10}  {value}")
    links.require_commit(parsed, allow_local=True)


@cli.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path())
@click.option("--assignment", metavar="ID")
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True)
def check(path: Path, assignment: str | None, lang: Language) -> None:
    """Run the public checks on your own working tree. No Docker needed; nothing is uploaded."""
    console = Console(stderr=True)
    progress = TerminalProgress(console)
    try:
        gradings = pipeline.check(path, assignment, lang, Settings(), progress)
    finally:
        progress.done()
    for grading in gradings:
        terminal.show(grading.record, console, lang)


@cli.command()
@click.argument("assignment", metavar="ID", required=False)
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True)
def assignments(assignment: str | None, lang: Language) -> None:
    """List the assignments, or the items and points of one."""
    known = manifests.load_all(Settings().assignments)
    if assignment is None:
        rows = [(item.id, item.title.in_language(lang), f"{item.maximum:g}") for item in known.values()]
    elif assignment in known:
        rows = [(item.id, item.title.in_language(lang), f"{item.points:g}") for item in known[assignment].items]
    else:
        raise UsageError(f"there is no assignment {assignment!r}", f"known are: {', '.join(known)}")
    table = Table("id", "title", "points")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


@cli.command()
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-f", "--format", "form", type=click.Choice(["html", "md", "junit", "gradescope"]), default="html")
@click.option("--view", type=click.Choice(["student", "staff"]), default="student", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Standard output if left out.")
@click.option("--lang", type=click.Choice(["en", "zh"]))
@click.option("--verify", is_flag=True, help="Say whether the record is as its owner signed it, and draw nothing.")
@click.option("--key", metavar="PUBLIC", help="With --verify: the public key; that of GRADER_SIGNING_KEY if left out.")
def report(
    record: Path, form: Any, view: Any, output: Path | None, lang: Language | None, verify: bool, key: str | None
) -> None:
    """Draw a report from a record."""
    found = read_record(record)
    if verify:
        verdict = signature.verify(found, key or _own_public_key())
        click.echo(verdict)
        raise SystemExit(0 if verdict is signature.Verdict.GENUINE else 1)
    text = render(found, form, view, lang)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


def _own_public_key() -> str:
    path = Settings().signing_key
    if path is None:
        raise UsageError("no key to verify with", "name one with --key, or set GRADER_SIGNING_KEY")
    return signature.public_text(signature.load_key(path))


@cli.command()
@click.option("--key", type=click.Path(dir_okay=False, path_type=Path), help="Where; GRADER_SIGNING_KEY if left out.")
def keys(key: Path | None) -> None:
    """Show the public key with which records are verified; make the pair first where there is none."""
    path = key or Settings().signing_key
    if path is None:
        raise UsageError("no place for the key was named", "name one with --key, or set GRADER_SIGNING_KEY")
    if not path.exists():
        signature.make_key(path)
    click.echo(signature.public_text(signature.load_key(path)))


@cli.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR")
def starter(ids: tuple[str, ...], output: Path) -> None:
    """Write the student template of one assignment or more."""
    settings = Settings()
    known = manifests.load_all(settings.assignments)
    for name in ids:
        if name not in known or known[name].track != "torch":
            raise UsageError(f"there is no starter of {name!r}", "see `grader assignments`; C++ ones have their own")
    from grader.assignment.starter import starter as make_starter  # noqa: PLC0415  (libcst is slow to import)

    files = make_starter(
        [known[name] for name in ids], known.values(), PROJECT_ROOT / "reference", settings.assignments
    )
    if output.exists() and any(output.iterdir()):
        raise UsageError(f"{output} is not empty", "name a folder that is not there yet")
    write_folder(output, files)
    click.echo(output)


@cli.command()
def doctor() -> None:
    """Say what this machine can grade, what is missing, and how to get it."""
    table = Table("", "what", "found", "how to get it")
    for row in doctor_checks.examine():
        table.add_row("✓" if row.works else "✗", escape(row.what), escape(row.found), escape(row.fix))
    Console().print(table)


@cli.group()
def images() -> None:
    """The images in which submissions are built and run."""


@images.command("build")
@click.argument("name", required=False, type=click.Choice(image_store.NAMES))
def images_build(name: image_store.Name | None) -> None:
    """Build one image, or all; what is there already is not built again."""
    console = Console(stderr=True)
    for each in (name,) if name else image_store.NAMES:
        click.echo(image_store.ensure(each, lambda line: console.print(Text(line, style="dim"))))


def run_edge(command: Callable[..., Any], arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: the one place where errors become words."""
    debug = "--debug" in (arguments if arguments is not None else sys.argv[1:])
    try:
        command(args=arguments, standalone_mode=False, obj={})
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except GraderError as error:
        _say(error.what, error.advice)
        if debug:
            traceback.print_exc()
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the edge: a bug of ours must not look like a verdict
        _keep_traceback(debug)
        _say(f"internal error: {type(error).__name__}: {error}", f"nothing was scored; see {Settings().log}")
        return 4
    return 0


def _say(what: str, advice: str) -> None:
    click.echo(f"error: {' '.join(what.split())}", err=True)
    if advice:
        click.echo(f"  {' '.join(advice.split())}", err=True)


def _keep_traceback(debug: bool) -> None:
    if debug:
        traceback.print_exc()
    log = Settings().log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        traceback.print_exc(file=stream)


def main() -> None:
    """Enter from the console script. Being told to end must still remove sandboxes, so it ends as an exception does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    raise SystemExit(run_edge(cli))


if __name__ == "__main__":
    main()
