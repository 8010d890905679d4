"""The fixed words of a report, in the two languages of the course."""

from grader.record import CheckStatus, RecordStatus

_WORDS: dict[str, tuple[str, str]] = {
    "report": ("Grading report", "评分报告"),
    "score": ("Score", "得分"),
    "of": ("of", "/"),
    "available_here": ("available on this runner", "本评测机可得"),
    "whole": ("whole assignment", "作业总分"),
    "provisional": ("Provisional", "暂定成绩"),
    "items": ("Items", "评分项"),
    "item": ("Item", "评分项"),
    "points": ("Points", "分值"),
    "status": ("Status", "状态"),
    "check": ("Check", "检查"),
    "checks": ("checks", "项检查"),
    "flags": ("For a person to look at", "需人工查看"),
    "flags_note": ("A flag alone costs no points.", "标记本身不扣分。"),
    "submission": ("Submission", "提交"),
    "repository": ("Repository", "仓库"),
    "commit": ("Commit", "提交号"),
    "student": ("Student", "学员"),
    "runner": ("Runner", "评测环境"),
    "isolated": ("isolated", "隔离"),
    "not_isolated": ("not isolated", "未隔离"),
    "time": ("Time", "用时"),
    "hint": ("Hint", "提示"),
    "hidden": ("hidden check", "隐藏检查"),
    "advice": ("advice, no points", "建议，不计分"),
    "details": ("Numbers", "数值"),
    "worth_zero": ("costs no points", "不扣分"),
    "rank": ("rank", "进程号 rank"),
    "tensor": ("tensor", "张量"),
    "worst_index": ("worst index", "误差最大处"),
    "got": ("got", "你的值"),
    "expected": ("expected", "应为"),
    "absolute_error": ("absolute error", "绝对误差"),
    "relative_error": ("relative error", "相对误差"),
    "bound": ("bound", "允许误差"),
    "looks_like": ("looks like", "误差形态"),
    "build_messages": ("Compiler messages", "编译信息"),
    "what_next": ("What to mend first", "先改哪里"),
    "all_right": ("Every check that ran here passed.", "本环境运行的检查全部通过。"),
    "signature": ("Signature", "签名"),
    "unsigned": ("unsigned", "未签名"),
    "graded_at": ("Graded", "评测时间"),
    "artifacts": ("Files of this grading", "本次评测的文件"),
    "environment": ("What made the numbers", "数值由来"),
}

_STATUS: dict[str, tuple[str, str]] = {
    CheckStatus.PASSED: ("passed", "通过"),
    CheckStatus.FAILED: ("failed", "未通过"),
    CheckStatus.SKIPPED: ("skipped", "跳过"),
    CheckStatus.NOT_RUN: ("not run here", "未在此运行"),
    CheckStatus.BUILD_ERROR: ("build error", "编译错误"),
    CheckStatus.TIMEOUT: ("timeout", "超时"),
    CheckStatus.OUT_OF_MEMORY: ("out of memory", "内存超限"),
    CheckStatus.CRASHED: ("crashed", "崩溃"),
    CheckStatus.SUSPICIOUS: ("suspicious", "可疑"),
    CheckStatus.INFRA_ERROR: ("grader's fault", "评测系统故障"),
    RecordStatus.GRADED: ("graded", "已评分"),
    RecordStatus.REFUSED: ("refused", "已拒绝"),
}


def word(key: str, language: str) -> str:
    """Return a fixed word; raises KeyError for one that is not in the list."""
    return _WORDS[key][language == "zh"]


def status_word(status: str, language: str) -> str:
    """Return a status for people to read."""
    return _STATUS[status][language == "zh"]


def number(value: float) -> str:
    """Return points without a needless `.0`, with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
