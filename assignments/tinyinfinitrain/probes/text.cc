// The data set, the tokenizer and text generation.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "probe.h"

#include "infini_train/include/nn/modules/module.h"

#include "example/common/tiny_shakespeare_dataset.h"
#include "example/common/tokenizer.h"

namespace {
using infini_train::DataType;
using infini_train::Device;
using infini_train::DeviceType;
using infini_train::Tensor;
using probe::Case;
using probe::TensorPtr;

// Reads the file CASE.bin at a sequence length. Outputs the size, and every sample's inputs and labels.
void Dataset(Case &one) {
    const TinyShakespeareDataset dataset(one.arguments.Path(one.name + ".bin"), one.Whole("length"));
    const size_t size = dataset.Size();
    one.SaveNumber("size", static_cast<int64_t>(size));
    one.Keep();
    for (size_t i = 0; i < size && i < 10000; ++i) {
        one.SaveNumber("reached", static_cast<int64_t>(i));
        const auto sample = dataset[i];
        probe::SaveTensor(one, "x." + std::to_string(i), sample.first);
        probe::SaveTensor(one, "y." + std::to_string(i), sample.second);
    }
}

// Reads CASE.bin and decodes the identifiers asked for: their bytes, one after the other, and their lengths.
void Tokenizer(Case &one) {
    const infini_train::Tokenizer tokenizer(one.arguments.Path(one.name + ".bin"));
    one.SaveNumber("end_token", tokenizer.GetEndToken());
    std::string text;
    std::vector<int64_t> lengths;
    for (size_t i = 0; i < one.Input("ids").Count<int64_t>(); ++i) {
        const std::string piece = tokenizer.Decode(static_cast<uint32_t>(one.Whole("ids", i)));
        text += piece;
        lengths.push_back(static_cast<int64_t>(piece.size()));
    }
    one.Save("text", probe::Text(text));
    one.Save("lengths", probe::Numbers<int64_t>("I64", lengths));
}

// A model whose next token is certain: `successor` of the current one, whatever the random state. It keeps
// what it was given.
class Successor : public infini_train::nn::Module {
public:
    Successor(Case &one, Device device) : one_(one), device_of_inputs_(device) {}

    std::vector<TensorPtr> Forward(const std::vector<TensorPtr> &inputs) override {
        const auto tokens = std::make_shared<Tensor>(inputs[0]->To(Device(DeviceType::kCPU, 0)));
        one_.SaveNumber("calls", ++calls_);
        probe::SaveTensor(one_, "fed", tokens);
        one_.Keep();
        const int64_t vocabulary = static_cast<int64_t>(one_.Input("successor").Count<int64_t>());
        const int64_t places = static_cast<int64_t>(tokens->NumElements());
        std::vector<float> scores(places * vocabulary, -200.0f);
        for (int64_t i = 0; i < places; ++i) {
            const int64_t token = static_cast<const int64_t *>(tokens->DataPtr())[i];
            scores[i * vocabulary + one_.Whole("successor", token % vocabulary)] = 0.0f;
        }
        auto shape = tokens->Dims();
        shape.push_back(vocabulary);
        const auto logits = std::make_shared<Tensor>(shape, DataType::kFLOAT32, device_of_inputs_);
        probe::CopyIn(scores.data(), logits);
        return {logits};
    }

private:
    Case &one_;
    const Device device_of_inputs_;
    int64_t calls_ = 0;
};

// Generates text with that model. What is printed is the case's standard output. `piece` is how many bytes the first
// token decodes to: none where the tokenizer is not filled in.
void Generate(Case &one) {
    const infini_train::Tokenizer tokenizer(one.arguments.Path(one.name + ".bin"));
    const Device device = probe::DeviceOf(one);
    Successor model(one, device);
    one.SaveNumber("piece", static_cast<int64_t>(tokenizer.Decode(0).size()));
    one.Keep();
    tokenizer.GenerateText(model, static_cast<uint32_t>(one.Whole("sizes", 0)),
                           static_cast<uint32_t>(one.Whole("sizes", 1)),
                           static_cast<uint32_t>(one.Whole("sizes", 2)), device);
}
} // namespace

int main(int argc, char **argv) {
    return probe::Main(argc, argv, {{"dataset", Dataset}, {"tokenizer", Tokenizer}, {"generate", Generate}});
}
