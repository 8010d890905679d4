from grader.tracks.cpp.compiler import errors

LOG = """[1/9] Building CXX object CMakeFiles/infini_train_cpu_kernels.dir/kernels/linear.cc.o
FAILED: [code=1] CMakeFiles/infini_train_cpu_kernels.dir/kernels/linear.cc.o
/work/launcher /usr/bin/c++ -c /work/src/kernels/linear.cc
/work/src/kernels/linear.cc: In function 'void f()':
/work/src/kernels/linear.cc:12:5: error: 'x' was not declared in this scope
   12 |     x = 1;
/work/src/include/tensor.h:3:10: fatal error: none.h: No such file or directory
FAILED: [code=1] CMakeFiles/test_tensor.dir/test/tensor/test_tensor.cc.o
/work/src/include/tensor.h:3:10: fatal error: none.h: No such file or directory
FAILED: [code=1] /work/out/test_adam
mold: error: undefined symbol: infini_train::Adam::Step()
/usr/bin/ld: adam.cc:(.text+0x1): undefined reference to `infini_train::Neg()'
"""


def found(log):
    return errors(log, ("/work/src/",))


def test_complaint_names_file_line_column_and_message_in_the_students_own_path():
    first = found(LOG)[0]
    assert (first.path, first.line, first.column) == ("kernels/linear.cc", 12, 5)
    assert first.message == "'x' was not declared in this scope"
    assert first.target == "infini_train_cpu_kernels"


def test_complaint_of_a_header_that_many_files_include_is_told_once():
    assert [error.path for error in found(LOG)].count("include/tensor.h") == 1


def test_undefined_symbols_of_either_linker_are_complaints():
    symbols = [error.message for error in found(LOG) if not error.path]
    assert symbols == [
        "undefined reference to infini_train::Adam::Step()",
        "undefined reference to infini_train::Neg()",
    ]


def test_error_of_the_build_file_is_a_complaint():
    log = "CMake Error at CMakeLists.txt:7 (target_link_libraries):\n  Cannot specify link libraries.\n\n"
    (only,) = found(log)
    assert (only.path, only.line, only.message) == ("CMakeLists.txt", 7, "Cannot specify link libraries.")


def test_warnings_and_notes_are_no_complaints():
    assert found("/work/src/a.cc:1:2: warning: unused\n/work/src/a.cc:1:2: note: here\n") == ()
