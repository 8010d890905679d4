"""JUnit XML: an item is a suite, a check a case. Made with the `junitparser` library, which escapes."""

import re

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from grader.record import Check, CheckStatus, Record
from grader.report.words import status_word

_SKIPPED = {CheckStatus.SKIPPED, CheckStatus.NOT_RUN}
_FAILED = {CheckStatus.FAILED, CheckStatus.SUSPICIOUS}
# XML 1.0 cannot carry most control characters at all, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(record: Record, language: str) -> str:
    """Return the XML text."""
    document = JUnitXml(f"{record.assignment.id} {record.submission.commit[:12]}")
    for item in record.items:
        suite = TestSuite(item.id)
        for check in item.checks:
            suite.add_testcase(_case(item.id, check, language))
        document.add_testsuite(suite)
    document.update_statistics()
    return str(document.tostring().decode("utf-8"))


def _case(item_id: str, check: Check, language: str) -> TestCase:
    case = TestCase(check.id, classname=item_id, time=check.duration_s)
    text = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", "\n".join(filter(None, (check.message, check.hint))))
    message = text.split("\n")[0] or status_word(check.status, language)
    if check.status in _SKIPPED:
        case.result = [Skipped(message)]
    elif check.status in _FAILED:
        case.result = [_with_text(Failure(message, str(check.status)), text)]
    elif check.status is not CheckStatus.PASSED:
        case.result = [_with_text(Error(message, str(check.status)), text)]
    return case


def _with_text(result: Failure | Error, text: str) -> Failure | Error:
    result.text = text
    return result
