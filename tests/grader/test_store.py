import threading

import pytest

from grader.errors import InfrastructureError
from grader.record import RecordStatus
from grader.store import (
    Grading,
    ResultCache,
    artifacts,
    digest_of,
    digest_of_folder,
    keep_earlier_result,
    read_record,
    record_bytes,
    write_folder,
)
from tests.fixtures.records import half_done


def grading_with_log():
    files = {"logs/build.log": b"one line\n"}
    return Grading(half_done().model_copy(update={"artifacts": artifacts(files)}), files)


def test_record_survives_writing_and_reading(tmp_path):
    write_folder(tmp_path / "out", {"record.json": record_bytes(half_done())})
    assert read_record(tmp_path / "out" / "record.json") == half_done()


def test_cache_returns_what_was_put(tmp_path):
    cache, grading = ResultCache(tmp_path), grading_with_log()
    assert cache.get("key") is None
    cache.put("key", grading)
    assert cache.get("key") == grading


def test_cache_forgets_an_entry_whose_log_was_changed(tmp_path):
    cache = ResultCache(tmp_path)
    cache.put("key", grading_with_log())
    (tmp_path / "key" / "logs" / "build.log").write_bytes(b"other\n")
    assert cache.get("key") is None


def test_cache_never_keeps_an_infrastructure_error(tmp_path):
    broken = half_done().model_copy(update={"status": RecordStatus.INFRA_ERROR})
    ResultCache(tmp_path).put("key", Grading(broken))
    assert ResultCache(tmp_path).get("key") is None


def test_infrastructure_error_does_not_replace_an_earlier_result(tmp_path):
    broken = half_done().model_copy(update={"status": RecordStatus.INFRA_ERROR})
    assert not keep_earlier_result(tmp_path, broken)
    write_folder(tmp_path / "out", {"record.json": record_bytes(half_done())})
    assert keep_earlier_result(tmp_path / "out", broken)
    assert not keep_earlier_result(tmp_path / "out", half_done())


def test_four_writers_of_one_folder_leave_one_whole_folder(tmp_path):
    def write(number):
        for _ in range(20):
            write_folder(tmp_path / "out", {"a": bytes([number]) * 1000, "b": bytes([number]) * 1000})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "out" / "a").read_bytes() == (tmp_path / "out" / "b").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def test_unreadable_record_is_our_fault_and_says_where(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(InfrastructureError, match=r"record\.json"):
        read_record(tmp_path / "record.json")


def test_digests_do_not_run_together(tmp_path):
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    (tmp_path / "x").write_text("1")
    before = digest_of_folder(tmp_path)
    (tmp_path / "x").write_text("2")
    assert digest_of_folder(tmp_path) != before
