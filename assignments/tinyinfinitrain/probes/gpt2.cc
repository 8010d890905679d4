// A small GPT-2, read from a checkpoint: its logits, every parameter's gradient, and a few steps of training.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "probe.h"

#include "infini_train/include/dataloader.h"
#include "infini_train/include/nn/modules/loss.h"
#include "infini_train/include/optimizer.h"

#include "example/common/tiny_shakespeare_dataset.h"
#include "example/gpt2/net.h"

namespace {
using infini_train::Device;
using infini_train::Tensor;
using probe::Case;
using probe::InputTensor;
using probe::SaveTensor;
using probe::TensorPtr;

std::unique_ptr<GPT2> Load(const Case &one) {
    auto model = GPT2::FromLLMC(one.arguments.Path("model.bin"));
    model->To(probe::DeviceOf(one));
    return model;
}

void Logits(Case &one) {
    const auto model = Load(one);
    SaveTensor(one, "logits", model->Forward({InputTensor(one, "tokens")}), 0);
}

// Outputs the loss and grad.NAME for every name of the state dictionary. `tied` tells whether the embedding
// and the output layer share their weight: they do on the CPU, and do not once the model was moved.
void Gradients(Case &one) {
    const auto model = Load(one);
    const auto logits = model->Forward({InputTensor(one, "tokens")})[0];
    infini_train::nn::CrossEntropyLoss criterion;
    criterion.To(probe::DeviceOf(one));
    const auto loss = criterion.Forward({logits, InputTensor(one, "targets")})[0];
    SaveTensor(one, "loss", loss);
    one.Keep();
    loss->Backward();
    auto state = model->StateDict();
    for (const auto &[name, parameter] : state) { SaveTensor(one, "grad." + name, parameter->grad()); }
    one.SaveNumber("tied", state.at("transformer.wte.weight") == state.at("lm_head.weight") ? 1 : 0);
}

// Trains with the framework's own loader and optimizer: `steps` steps of `accumulate` microbatches. The tied
// weight and its untied copies stay as they are: the framework lists them twice, which is not the student's doing.
void Training(Case &one) {
    const auto model = Load(one);
    const Device device = probe::DeviceOf(one);
    auto state = model->StateDict();
    std::vector<TensorPtr> parameters;
    for (const auto &[name, parameter] : state) {
        if (name != "transformer.wte.weight" && name != "lm_head.weight") {
            parameters.push_back(parameter);
        }
    }
    infini_train::optimizers::SGD optimizer(parameters, one.Real("learning_rate"));
    infini_train::nn::CrossEntropyLoss criterion;
    criterion.To(device);
    infini_train::DataLoader loader(
        std::make_shared<TinyShakespeareDataset>(one.arguments.Path("tokens.bin"), one.Whole("length")),
        one.Whole("batch"));
    auto batches = loader.begin();
    std::vector<float> losses;
    for (int64_t step = 0; step < one.Whole("steps"); ++step) {
        optimizer.ZeroGrad();
        for (int64_t micro = 0; micro < one.Whole("accumulate"); ++micro) {
            auto [x, y] = *batches;
            ++batches;
            x = std::make_shared<Tensor>(x->To(device));
            y = std::make_shared<Tensor>(y->To(device));
            const auto loss = criterion.Forward({model->Forward({x})[0], y})[0];
            losses.push_back(0.0f);
            probe::CopyOut(loss, &losses.back());
            loss->Backward();
        }
        optimizer.Step();
    }
    one.Save("losses", probe::Numbers<float>("F32", losses));
    for (const auto &[name, parameter] : state) { SaveTensor(one, "param." + name, parameter); }
}
} // namespace

int main(int argc, char **argv) {
    return probe::Main(argc, argv, {{"logits", Logits}, {"gradients", Gradients}, {"training", Training}});
}
