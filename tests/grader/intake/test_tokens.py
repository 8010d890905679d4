import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.intake.tokens import Change, compare

CPP = """\
#include <b.h>
#include <a.h>
// a comment
#define TWICE(x) \\
    ((x) + (x))
namespace n {
int add(std::vector<std::vector<int>> a, const char *s) {
    /* a block
       comment */
    return TWICE(a[0][0]) + s[0] - 'x' + 1'000; // trailing
}
} // namespace n
"""
REFORMATTED = """\
#include <a.h>
#include <b.h>
#define  TWICE( x )  ( ( x )+( x ) )
namespace n
{
int add( std::vector<std::vector<int> > a,
         const char* s )
{
\treturn TWICE( a[ 0 ][ 0 ] )+s[ 0 ]-'x'+1'000;
}
}
"""
PYTHON = "def f(a, b):\n    # why\n    return [a,\n            b]\n\n\nclass C:\n    x = 1\n"


def test_a_file_reformatted_without_its_comments_is_harmless() -> None:
    assert compare("a.cc", CPP.encode(), REFORMATTED.encode()).change is Change.HARMLESS


@pytest.mark.parametrize("path", ["a.cc", "a.py", "CMakeLists.txt", "notes.txt", "b.cuh"])
def test_line_ends_and_a_byte_order_mark_are_harmless(path: str) -> None:
    edited = "\ufeffx = 1\r\ny = 2\r\n".encode()
    assert compare(path, b"x = 1\ny = 2\n", edited).change is Change.HARMLESS


def test_the_same_bytes_are_no_edit() -> None:
    assert compare("a.cc", CPP.encode(), CPP.encode()).change is Change.NONE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a[0][0]", "a[0][1]"),
        ("'x'", "'y'"),
        ("TWICE(x)", "TWICE(y)"),
        ("#include <a.h>\n", ""),
        ("// a comment\n", "GTEST_SKIP();\n"),
        ("((x) + (x))", "((x) + (x)) // \\\n + 1"),
        ("+ s[0] -", "+ s[0] - -"),
        ("'x' + 1", "'x' ++ 1"),
        ("    return", "#if 0\n    return"),
        ("1'000", "1'001"),
        ("const char *s", 'const char *s = "//"'),
        ("} // namespace n", "} int more;"),
    ],
)
def test_an_edit_that_a_compiler_sees_is_real(old: str, new: str) -> None:
    assert old in CPP
    expected = Change.HARMLESS if "// \\" in new else Change.REAL  # a backslash carries a comment on
    assert compare("a.cc", CPP.encode(), CPP.replace(old, new).encode()).change is expected


@pytest.mark.parametrize(
    ("original", "edited"),
    [
        ('auto s = "a b";', 'auto s = "a  b";'),
        ('auto s = R"x(a // b)x";', 'auto s = R"x(a // c)x";'),
        ('auto s = "\\"//";', 'auto s = "\\"/ /";'),
        ("a = b + +c;", "a = b ++c;"),
        ("a--b;", "a - -b;"),
        ("int ab;", "int a b;"),
        ("#define A 1\nB", "#define A 1 B"),
        ('f("/*"); g("*/");', 'f("/*"); h("*/");'),
    ],
)
def test_cpp_details_that_look_like_layout_are_real(original: str, edited: str) -> None:
    assert compare("a.cc", original.encode(), edited.encode()).change is Change.REAL


def test_the_line_of_the_first_difference_is_named() -> None:
    assert compare("a.cc", CPP.encode(), CPP.replace("a[0][0]", "a[0][1]").encode()).line == 10
    assert compare("a.cc", b"int a;", b"int a;\n\nint b;").line == 3
    assert compare("a.cc", b"int a;\nint b;\n", b"int a;\n").line == 1
    assert compare("a.cc", b"int a;", b"").line is None


def test_python_is_compared_by_token() -> None:
    reformatted = "def f(a,b):\n  return [a, b]  # so\n\nclass C:\n\tx=1\n"
    assert compare("a.py", PYTHON.encode(), reformatted.encode()).change is Change.HARMLESS
    assert compare("a.py", PYTHON.encode(), PYTHON.replace("    x", "x").encode()).change is Change.REAL
    assert compare("a.py", b"if a:\n    b\n    c\n", b"if a:\n    b\nc\n").change is Change.REAL
    assert compare("a.py", PYTHON.encode(), b"def f(:\n  '''").change is Change.REAL


def test_cmake_is_compared_by_token() -> None:
    original = b'add_library(x a.cc "b c.cc") # why\n'
    assert compare("x/CMakeLists.txt", original, b'add_library( x\n  a.cc "b c.cc" )\n').change is Change.HARMLESS
    assert compare("x/CMakeLists.txt", original, b'add_library(x a.cc "b  c.cc")').change is Change.REAL


def test_binary_and_very_large_files_are_compared_whole() -> None:
    assert compare("a.cc", b"\0 a", b"\0  a").change is Change.REAL
    assert compare("a.cc", b"int a;" + b" " * (1 << 20), b"int a;").change is Change.REAL


@pytest.mark.parametrize(
    "hostile",
    [
        "//\\\n\n",
        "/*",
        "/*/",
        "*/",
        'R"(',
        '"\\',
        "'",
        "(",
        "<",
        "a::",
        "a ",
        "\\\n",
        "#",
        "#include\n",
        "/**/ ",
        "1'1",
    ],
)
@pytest.mark.parametrize("path", ["a.cc", "a.py", "CMakeLists.txt", "a.txt"])
def test_no_text_takes_long(path: str, hostile: str) -> None:
    text = (hostile * (200_000 // len(hostile))).encode()
    began = time.process_time()
    compare(path, b"int a;", text)
    assert time.process_time() - began < 5.0


@given(st.sampled_from(["a.cc", "a.py", "CMakeLists.txt", "a.txt"]), st.binary(), st.binary())
def test_any_bytes_can_be_compared(path: str, original: bytes, edited: bytes) -> None:
    assert (compare(path, original, edited).change is Change.NONE) == (original == edited)


@given(st.text(alphabet="ab /*\\\n\"'#(){}<>+-=1.R"))
def test_a_comment_appended_to_a_closed_program_is_harmless(text: str) -> None:
    original = f'{text}\n*/"\n;'
    if compare("a.cc", original.encode(), f"{original} ".encode()).change is Change.HARMLESS:
        edited = f"{original}\n/* more */ // and more\n"
        assert compare("a.cc", original.encode(), edited.encode()).change is Change.HARMLESS
