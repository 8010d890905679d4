// Reads and writes tensors as safetensors files: an 8-byte length, a JSON header, and the raw bytes.
//
// Only what the probes exchange with the judge is understood: names of printable ASCII without quotes and
// backslashes, row-major data, little-endian machines. Anything else is refused by an exception, because one
// of the files that are read back was written by a process in which student code ran.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace probe {

// A tensor on the host. `dtype` is spelled as safetensors does: "F32", "I64", "U8".
struct Array {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;

    template <typename T> const T *As() const { return reinterpret_cast<const T *>(bytes.data()); }
    template <typename T> size_t Count() const { return bytes.size() / sizeof(T); }
};

using Arrays = std::map<std::string, Array>;

namespace detail {

// A reader of the JSON that a safetensors header is made of: objects, arrays, strings, and whole numbers.
class Header {
public:
    explicit Header(std::string text) : text_(std::move(text)) {}

    void Expect(char wanted) {
        if (!Accept(wanted)) {
            throw std::runtime_error(std::string("tensor file: expected '") + wanted + "' at " + std::to_string(at_));
        }
    }

    bool Accept(char wanted) {
        SkipSpace();
        if (at_ < text_.size() && text_[at_] == wanted) {
            ++at_;
            return true;
        }
        return false;
    }

    std::string String() {
        Expect('"');
        const size_t begin = at_;
        while (at_ < text_.size() && text_[at_] != '"') {
            if (text_[at_] == '\\') {
                throw std::runtime_error("tensor file: a name with a backslash");
            }
            ++at_;
        }
        const std::string value = text_.substr(begin, at_ - begin);
        Expect('"');
        return value;
    }

    int64_t Number() {
        SkipSpace();
        const size_t begin = at_;
        while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) { ++at_; }
        if (begin == at_ || at_ - begin > 15) {
            throw std::runtime_error("tensor file: no whole number at " + std::to_string(begin));
        }
        return std::stoll(text_.substr(begin, at_ - begin));
    }

    std::vector<int64_t> Numbers() {
        std::vector<int64_t> values;
        Expect('[');
        if (Accept(']')) {
            return values;
        }
        do { values.push_back(Number()); } while (Accept(','));
        Expect(']');
        return values;
    }

private:
    void SkipSpace() {
        while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) { ++at_; }
    }

    const std::string text_;
    size_t at_ = 0;
};

inline size_t BytesOf(const std::string &dtype) {
    static const std::map<std::string, size_t> sizes
        = {{"U8", 1}, {"I8", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2}, {"BF16", 2},
           {"U32", 4}, {"I32", 4}, {"F32", 4}, {"U64", 8}, {"I64", 8}, {"F64", 8}};
    return sizes.at(dtype);
}

inline Array ReadEntry(Header &header, const std::string &data) {
    Array array;
    std::vector<int64_t> offsets;
    header.Expect('{');
    do {
        const std::string key = header.String();
        header.Expect(':');
        if (key == "dtype") {
            array.dtype = header.String();
        } else if (key == "shape") {
            array.shape = header.Numbers();
        } else if (key == "data_offsets") {
            offsets = header.Numbers();
        } else {
            throw std::runtime_error("tensor file: unknown key " + key);
        }
    } while (header.Accept(','));
    header.Expect('}');
    size_t expected = BytesOf(array.dtype);
    for (const int64_t size : array.shape) { expected *= static_cast<size_t>(size); }
    if (offsets.size() != 2 || offsets[0] > offsets[1] || static_cast<size_t>(offsets[1]) > data.size()
        || static_cast<size_t>(offsets[1] - offsets[0]) != expected) {
        throw std::runtime_error("tensor file: a tensor's place does not fit its shape");
    }
    array.bytes.assign(data.begin() + offsets[0], data.begin() + offsets[1]);
    return array;
}

} // namespace detail

inline std::string ReadBytes(const std::string &path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

// Reads every tensor of a file. Throws std::runtime_error (or std::out_of_range for an unknown dtype).
inline Arrays ReadTensorFile(const std::string &path) {
    const std::string content = ReadBytes(path);
    uint64_t header_size = 0;
    if (content.size() < sizeof(header_size)) {
        throw std::runtime_error("tensor file: missing or too short: " + path);
    }
    std::memcpy(&header_size, content.data(), sizeof(header_size));
    if (header_size > content.size() - sizeof(header_size)) {
        throw std::runtime_error("tensor file: its header ends after the file: " + path);
    }
    detail::Header header(content.substr(sizeof(header_size), header_size));
    const std::string data = content.substr(sizeof(header_size) + header_size);
    Arrays arrays;
    header.Expect('{');
    if (header.Accept('}')) {
        return arrays;
    }
    do {
        const std::string name = header.String();
        header.Expect(':');
        arrays[name] = detail::ReadEntry(header, data);
    } while (header.Accept(','));
    header.Expect('}');
    return arrays;
}

// Writes every tensor. The file appears under its name only when it is whole.
inline void WriteTensorFile(const std::string &path, const Arrays &arrays) {
    std::string header = "{";
    size_t offset = 0;
    for (const auto &[name, array] : arrays) {
        header += header.size() > 1 ? ",\"" : "\"";
        header += name + "\":{\"dtype\":\"" + array.dtype + "\",\"shape\":[";
        for (size_t i = 0; i < array.shape.size(); ++i) {
            header += (i ? "," : "") + std::to_string(array.shape[i]);
        }
        header += "],\"data_offsets\":[" + std::to_string(offset) + ",";
        offset += array.bytes.size();
        header += std::to_string(offset) + "]}";
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    const uint64_t header_size = header.size();
    const std::string partial = path + ".partial";
    {
        std::ofstream stream(partial, std::ios::binary | std::ios::trunc);
        stream.write(reinterpret_cast<const char *>(&header_size), sizeof(header_size));
        stream.write(header.data(), static_cast<std::streamsize>(header.size()));
        for (const auto &[name, array] : arrays) {
            stream.write(reinterpret_cast<const char *>(array.bytes.data()),
                         static_cast<std::streamsize>(array.bytes.size()));
        }
        if (!stream) {
            throw std::runtime_error("tensor file: cannot write " + partial);
        }
    }
    if (std::rename(partial.c_str(), path.c_str()) != 0) {
        throw std::runtime_error("tensor file: cannot rename " + partial);
    }
}

// One-dimensional arrays of plain numbers and of text.
template <typename T> Array Numbers(const std::string &dtype, const std::vector<T> &values) {
    Array array{dtype, {static_cast<int64_t>(values.size())}, {}};
    array.bytes.resize(values.size() * sizeof(T));
    if (!values.empty()) {
        std::memcpy(array.bytes.data(), values.data(), array.bytes.size());
    }
    return array;
}

inline Array Text(const std::string &text) {
    return Numbers("U8", std::vector<uint8_t>(text.begin(), text.end()));
}

} // namespace probe
