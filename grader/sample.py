"""`python -m grader.sample`: makes the sample repository and grades each of its commits, through the whole path."""

import shutil
from pathlib import Path

import click

from assignments.data_parallel import sample
from grader.cli import cli, run_edge


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/sample"), show_default=True)
def main(out: Path) -> None:
    """Grade the sample's commits, oldest first, and leave each one's record and reports in a folder of its own."""
    repository = out / "repository"
    shutil.rmtree(repository, ignore_errors=True)  # an earlier demo's; it is made anew, the same
    for number, stage in enumerate(sample.make(repository), start=1):
        folder = out / f"{number}-{stage.name.replace(' ', '-')}"
        click.secho(f"\n{number}. {stage.name}: grader submit {stage.link} --runner local", bold=True)
        code = run_edge(cli, ["submit", stage.link, "--runner", "local", "--out", str(folder)])
        if code != 0:
            raise SystemExit(code)
    click.echo(f"\nWhat a student sees: {out}/*/report.html")


if __name__ == "__main__":
    main()
