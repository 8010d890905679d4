// Neg, matmul, Adam, Flatten and Backward: the tasks that need nothing but the framework itself.
#include <memory>
#include <string>
#include <vector>

#include "probe.h"

#include "infini_train/include/autograd/elementwise.h"
#include "infini_train/include/autograd/function.h"
#include "infini_train/include/autograd/matmul.h"
#include "infini_train/include/optimizer.h"

namespace {
using namespace infini_train;
using probe::Case;
using probe::InputTensor;
using probe::SaveTensor;
using probe::TensorPtr;

// Inputs x, grad. Outputs y = -x and the gradient of x.
void Neg(Case &one) {
    const auto operation = std::make_shared<autograd::Neg>();
    SaveTensor(one, "y", operation->Forward({InputTensor(one, "x")}), 0);
    SaveTensor(one, "grad_x", operation->Backward({InputTensor(one, "grad")}), 0);
}

// Inputs a, b, grad. Outputs y = a b and both gradients.
void Matmul(Case &one) {
    const auto a = InputTensor(one, "a");
    const auto b = InputTensor(one, "b");
    const auto operation = std::make_shared<autograd::Matmul>();
    const auto outputs = operation->Forward({a, b});
    SaveTensor(one, "y", outputs, 0);
    one.Keep();
    // The context comes from an output of the right shape, so that a wrong forward does not spoil the backward.
    const auto grad = InputTensor(one, "grad");
    const auto shape_of_output = std::make_shared<Tensor>(grad->Dims(), DataType::kFLOAT32, grad->GetDevice());
    operation->SetupContext({a, b}, {shape_of_output});
    const auto gradients = operation->Backward({grad});
    SaveTensor(one, "grad_a", gradients, 0);
    SaveTensor(one, "grad_b", gradients, 1);
}

// Inputs parameters param.0, param.1, ..., their gradients grad.0, ... with a leading dimension of steps, and
// hyper = (learning rate, beta1, beta2, epsilon). Outputs param.i after the last step and, for the first
// parameter, after every step.
void Adam(Case &one) {
    std::vector<TensorPtr> parameters;
    while (one.Has("param." + std::to_string(parameters.size()))) {
        parameters.push_back(InputTensor(one, "param." + std::to_string(parameters.size())));
        parameters.back()->RequiresGrad();
    }
    optimizers::Adam optimizer(parameters, one.Real("hyper", 0), one.Real("hyper", 1), one.Real("hyper", 2),
                               one.Real("hyper", 3));
    const int64_t steps = one.Input("grad.0").shape[0];
    for (int64_t step = 0; step < steps; ++step) {
        for (size_t i = 0; i < parameters.size(); ++i) {
            const auto &gradients = one.Input("grad." + std::to_string(i));
            probe::CopyIn(gradients.bytes.data() + step * parameters[i]->SizeInBytes(), parameters[i]->grad());
        }
        optimizer.Step();
        for (size_t i = 0; i < parameters.size(); ++i) {
            SaveTensor(one, "param." + std::to_string(i) + "." + std::to_string(step), parameters[i]);
        }
    }
}

// Inputs x, range = (start, end), perhaps transpose = (dim0, dim1), grad. Outputs y and the gradient of x, which is
// asked of the graph itself, so that this does not stand on `Tensor::Backward`. A range of one dimension may hand back
// the tensor that it was given: then its gradient is the output's.
void Flatten(Case &one) {
    const auto x = InputTensor(one, "x");
    x->RequiresGrad();
    const auto source = one.Has("transpose") ? x->Transpose(one.Whole("transpose", 0), one.Whole("transpose", 1)) : x;
    const auto y = source->Flatten(one.Whole("range", 0), one.Whole("range", 1));
    SaveTensor(one, "y", y);
    one.Keep();
    if (y == x) {
        SaveTensor(one, "grad_x", InputTensor(one, "grad"));
    } else if (y && y->NumElements() > 0 && y->grad_fn()) {
        y->grad_fn()->BackwardPartial(InputTensor(one, "grad"), y->output_idx());
        SaveTensor(one, "grad_x", x->grad());
    }
}

// The graphs of `Backward`, by the case's name. Every tensor that is not an input is used as a student would.
void BuildAndRunBackward(Case &one, const TensorPtr &x, const TensorPtr &w) {
    if (one.name == "square") {
        x->Mul(x)->Backward(InputTensor(one, "grad"));
    } else if (one.name == "diamond") {
        const auto shared = x->Mul(w);
        shared->Sin()->Add(shared->Mul(shared))->Backward(InputTensor(one, "grad"));
    } else if (one.name == "two_paths") {
        x->Mul(w)->Add(x->Tanh())->Backward(InputTensor(one, "grad"));
    } else if (one.name == "two_roots") {
        x->Mul(2.5f)->Backward(InputTensor(one, "grad"));
        x->Mul(x)->Backward(InputTensor(one, "grad_second"));
    } else if (one.name == "accumulated") {
        x->Mul(w)->Backward(InputTensor(one, "grad"));
        x->Mul(w)->Backward(InputTensor(one, "grad_second"));
    } else if (one.name == "scalar_root") {
        x->Mul(x)->Add(x->Sin())->Backward();
    } else if (one.name == "residual_chain") {
        auto y = x;
        for (int i = 0; i < 6; ++i) { y = y->Add(y->Tanh()); }
        y->Backward(InputTensor(one, "grad"));
    }
}

void Backward(Case &one) {
    const auto x = InputTensor(one, "x");
    x->RequiresGrad();
    TensorPtr w;
    if (one.Has("w")) {
        w = InputTensor(one, "w");
        w->RequiresGrad();
    }
    BuildAndRunBackward(one, x, w);
    SaveTensor(one, "grad_x", x->grad());
    if (w) {
        SaveTensor(one, "grad_w", w->grad());
    }
}
} // namespace

int main(int argc, char **argv) {
    return probe::Main(argc, argv,
                       {{"neg", Neg}, {"matmul", Matmul}, {"adam", Adam}, {"flatten", Flatten}, {"backward", Backward}});
}
