"""Every setting, once: its name, its default, and what it is for. `GRADER_<NAME>` in the environment overrides it."""

from pathlib import Path

import platformdirs
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

PROJECT_ROOT = Path(__file__).resolve().parent.parent


class Settings(BaseSettings):
    """What staff may change without touching code."""

    model_config = SettingsConfigDict(env_prefix="GRADER_", frozen=True, extra="ignore")

    cache: Path = Field(
        default=Path(platformdirs.user_cache_dir("tinyinfinitrain-grader")),
        description="mirrors of repositories, compile caches, results of earlier gradings",
    )
    assignments: Path = Field(default=PROJECT_ROOT / "assignments", description="one folder an assignment")
    hosts: tuple[str, ...] = Field(
        default=("github.com", "gitee.com", "gitlab.com"), description="hosts from which a link may come"
    )
    git_timeout_s: float = Field(default=300.0, gt=0, description="for any one git command, seconds")
    judge_workers: int = Field(default=2, ge=1, description="judges that run side by side, one sandbox each")
    judge_timeout_s: float = Field(default=900.0, gt=0, description="for the whole of judging, seconds")
    signing_key: Path | None = Field(default=None, description="Ed25519 private key with which records are signed")
    log: Path = Field(
        default=Path(platformdirs.user_log_dir("tinyinfinitrain-grader")) / "grader.log",
        description="where tracebacks of internal errors go",
    )
