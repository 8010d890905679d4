// Runs the cases of a probe, each in a child process of its own, so that a crash costs one case and is
// attributed to it. Knows nothing of the student's framework.
//
//     probe_NAME FOLDER probe=matmul device=cpu ...
//
// reads FOLDER/inputs.safetensors and writes FOLDER/outputs.safetensors. A tensor "x" of case "c" is called
// "c/x". Each case also has "c/status" (0 when it came to its end; minus the signal, or the exit code, when it
// did not), "c/stderr" and "c/stdout" (the last bytes of what it printed). Results never travel on the streams.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tensor_file.h"

namespace probe {

constexpr size_t kLogBytes = 16384;
constexpr unsigned kCaseSeconds = 20;

// What the command line said.
struct Arguments {
    std::string folder;
    std::map<std::string, std::string> values;

    std::string Get(const std::string &key, const std::string &fallback = "") const {
        const auto found = values.find(key);
        return found == values.end() ? fallback : found->second;
    }
    long Number(const std::string &key, long fallback) const {
        return values.count(key) ? std::stol(values.at(key)) : fallback;
    }
    std::string Path(const std::string &name) const { return folder + "/" + name; }
};

inline Arguments ParseArguments(int argc, char **argv) {
    Arguments arguments;
    arguments.folder = argc > 1 ? argv[1] : ".";
    for (int i = 2; i < argc; ++i) {
        const std::string word = argv[i];
        const size_t equals = word.find('=');
        if (equals != std::string::npos) {
            arguments.values[word.substr(0, equals)] = word.substr(equals + 1);
        }
    }
    return arguments;
}

// One case: its name, its own inputs (without the prefix), and its outputs, which are kept as they come.
class Case {
public:
    Case(const Arguments &arguments, std::string name, const Arrays &inputs)
        : arguments(arguments), name(std::move(name)) {
        const std::string prefix = this->name + "/";
        for (const auto &[key, array] : inputs) {
            if (key.compare(0, prefix.size(), prefix) == 0) {
                inputs_[key.substr(prefix.size())] = array;
            }
        }
    }

    bool Has(const std::string &key) const { return inputs_.count(key) > 0; }
    const Array &Input(const std::string &key) const { return inputs_.at(key); }
    int64_t Whole(const std::string &key, size_t index = 0) const { return Input(key).As<int64_t>()[index]; }
    float Real(const std::string &key, size_t index = 0) const { return Input(key).As<float>()[index]; }

    void Save(const std::string &key, Array array) { outputs_[key] = std::move(array); }
    void SaveNumber(const std::string &key, int64_t value) { Save(key, Numbers<int64_t>("I64", {value})); }
    // What was saved so far survives a crash that comes later.
    void Keep() const { WriteTensorFile(arguments.Path(name + ".case"), outputs_); }

    const Arguments &arguments;
    const std::string name;

private:
    Arrays inputs_;
    Arrays outputs_;
};

using CaseFunction = std::function<void(Case &)>;

namespace detail {

inline void Redirect(int descriptor, const std::string &path) {
    const int file = open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    if (file >= 0) {
        dup2(file, descriptor);
        close(file);
    }
}

[[noreturn]] inline void RunChild(Case &one, const CaseFunction &function) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    Redirect(STDOUT_FILENO, one.arguments.Path(one.name + ".stdout"));
    Redirect(STDERR_FILENO, one.arguments.Path(one.name + ".stderr"));
    alarm(kCaseSeconds);
    try {
        function(one);
        one.Keep();
    } catch (const std::exception &error) {
        std::cerr << "uncaught exception: " << error.what() << std::endl;
        std::cout.flush();
        _exit(70);
    }
    std::cout.flush();
    std::cerr.flush();
    _exit(0);
}

inline std::string Tail(const std::string &path) {
    const std::string content = ReadBytes(path);
    return content.size() <= kLogBytes ? content : content.substr(content.size() - kLogBytes);
}

inline int64_t WaitFor(pid_t child) {
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0) {
        return 71;
    }
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

} // namespace detail

// The names of the cases that the inputs hold, each once.
inline std::set<std::string> CaseNames(const Arrays &inputs) {
    std::set<std::string> names;
    for (const auto &[key, array] : inputs) { names.insert(key.substr(0, key.find('/'))); }
    return names;
}

// Runs `function` once a case and writes the outputs of all of them.
inline int RunCases(const Arguments &arguments, const Arrays &inputs, const CaseFunction &function) {
    Arrays outputs;
    for (const auto &name : CaseNames(inputs)) {
        Case one(arguments, name, inputs);
        const pid_t child = fork();
        if (child == 0) {
            detail::RunChild(one, function);
        }
        const int64_t status = detail::WaitFor(child);
        try {
            for (auto &[key, array] : ReadTensorFile(arguments.Path(name + ".case"))) {
                outputs[name + "/" + key] = std::move(array);
            }
        } catch (const std::exception &) {
            // No outputs: the status and the log say why.
        }
        outputs[name + "/status"] = Numbers<int64_t>("I64", {status});
        outputs[name + "/stdout"] = Text(detail::Tail(arguments.Path(name + ".stdout")));
        outputs[name + "/stderr"] = Text(detail::Tail(arguments.Path(name + ".stderr")));
    }
    WriteTensorFile(arguments.Path("outputs.safetensors"), outputs);
    return 0;
}

// A program's main: chooses one of `probes` by the argument `probe`.
inline int Main(int argc, char **argv, const std::map<std::string, CaseFunction> &probes) {
    const Arguments arguments = ParseArguments(argc, argv);
    const auto found = probes.find(arguments.Get("probe"));
    if (found == probes.end()) {
        std::cerr << "no probe is called '" << arguments.Get("probe") << "'" << std::endl;
        return 64;
    }
    return RunCases(arguments, ReadTensorFile(arguments.Path("inputs.safetensors")), found->second);
}

} // namespace probe
