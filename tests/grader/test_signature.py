import pytest

from grader import signature
from grader.errors import InfrastructureError, UsageError
from grader.signature import Verdict
from tests.fixtures.records import half_done


@pytest.fixture
def key(tmp_path):
    signature.make_key(tmp_path / "key.pem")
    return signature.load_key(tmp_path / "key.pem")


def test_signed_record_is_genuine(key):
    signed = signature.sign(half_done(), key)
    assert signature.verify(signed, signature.public_text(key)) is Verdict.GENUINE


def test_edited_record_is_recognised(key):
    edited = signature.sign(half_done(), key).model_copy(update={"score": 35.0})
    assert signature.verify(edited, signature.public_text(key)) is Verdict.FORGED


def test_record_of_another_key_is_recognised(key, tmp_path):
    signature.make_key(tmp_path / "other.pem")
    foreign = signature.sign(half_done(), signature.load_key(tmp_path / "other.pem"))
    assert signature.verify(foreign, signature.public_text(key)) is Verdict.FORGED


def test_signature_survives_writing_and_reading(key):
    signed = signature.sign(half_done(), key)
    read = type(signed).model_validate_json(signed.model_dump_json())
    assert signature.verify(read, signature.public_text(key)) is Verdict.GENUINE


def test_record_without_a_signature_is_unsigned(key):
    assert signature.verify(half_done(), signature.public_text(key)) is Verdict.UNSIGNED


def test_key_is_never_overwritten_and_is_its_owners_alone(tmp_path):
    signature.make_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError):
        signature.make_key(tmp_path / "key.pem")


def test_file_that_is_no_key_is_our_fault_and_says_so(tmp_path):
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(InfrastructureError, match="no readable private key"):
        signature.load_key(tmp_path / "key.pem")
