"""What the student fills in, by the names that the student knows, and the kernels that the framework registers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """A task: what it is called, and where it stands."""

    what: str
    where: str

    def __str__(self) -> str:
        """Return both, as they stand in a message."""
        return f"{self.what} in {self.where}"


NEG = Task("Neg::Forward and Neg::Backward", "infini_train/src/autograd/elementwise.cc")
MATMUL = {
    "cpu": Task("MatmulForward and MatmulBackward", "infini_train/src/kernels/cpu/linear.cc"),
    "cuda": Task("MatmulForward and MatmulBackward", "infini_train/src/kernels/cuda/linear.cu"),
}
ADAM = {
    "cpu": Task("AdamAccumulateGrad", "infini_train/src/kernels/cpu/accumulate_grad.cc"),
    "cuda": Task("AdamAccumulateGrad", "infini_train/src/kernels/cuda/accumulate_grad.cu"),
}
FLATTEN = Task("Tensor::Flatten", "infini_train/src/tensor.cc")
BACKWARD = Task("Tensor::Backward", "infini_train/src/tensor.cc")
DISPATCHER = Task("KernelFunction::Call, Dispatcher::Register and REGISTER_KERNEL", "infini_train/include/dispatcher.h")
DATASET = Task("ReadTinyShakespeareFile and the constructor", "example/common/tiny_shakespeare_dataset.cc")
TOKENIZER = Task("the Tokenizer's constructor and Decode", "example/common/tokenizer.cc")
GPT2 = Task("GPT-2, which stands on all the other tasks,", "example/gpt2/net.cc")
GENERATE = Task("Tokenizer::GenerateText", "example/common/tokenizer.cc")

_BOTH_WAYS = (
    "Neg", "Reciprocal", "Sin", "Cos", "Tanh", "Pow", "Rsqrt", "Add", "AddScalar", "Sub", "Mul", "MulScalar", "Div",
    "CrossEntropy", "Embedding", "LayerNorm", "Matmul", "Linear", "NoOp", "Outer", "Mean", "Sum", "Max", "Min",
    "Sigmoid", "Slice", "Softmax", "Split", "Stack", "Tril", "Triu", "Transpose", "Mask", "RepeatInterleave",
)  # fmt: skip
KERNELS = (
    "Fill",
    "AccumulateGrad",
    "AdamAccumulateGrad",
    "EqualsScalarForward",
    *(f"{name}{way}" for name in _BOTH_WAYS for way in ("Forward", "Backward")),
)
