// Registering and calling kernels. Names are distinct and one a line, because the variable that a macro makes
// may depend on the name alone.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "probe.h"

#include "infini_train/include/dispatcher.h"

using namespace infini_train;

namespace probe_kernels {
int64_t Weighted(int64_t a, int b, float c) { return a * 3 + b * 5 + static_cast<int64_t>(c * 7.0f); }
double Reals(float a, double b) { return a * 2.0 - b; }
void Accumulate(float *target, float amount) { *target += amount; }
float Dot(const std::vector<float> &a, const std::vector<float> &b) {
    float sum = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) { sum += a[i] * b[i]; }
    return sum;
}
std::shared_ptr<Tensor> Pass(const std::shared_ptr<Tensor> &tensor) { return tensor; }
int OnCpu(int a) { return a + 1000; }
int OnCuda(int a) { return a + 2000; }
int First(int a) { return a + 1; }
int Second(int a) { return a + 2; }
} // namespace probe_kernels

REGISTER_KERNEL(infini_train::DeviceType::kCPU, ProbeWeighted, probe_kernels::Weighted);
REGISTER_KERNEL(infini_train::DeviceType::kCPU, ProbeAccumulate, probe_kernels::Accumulate);
REGISTER_KERNEL(infini_train::DeviceType::kCPU, ProbeNamespaceScope, probe_kernels::First);

namespace {
using probe::Case;
using probe::Numbers;

const KernelFunction &Kernel(DeviceType device, const std::string &name) {
    return Dispatcher::Instance().GetKernel({device, name});
}

// Inputs wholes (a, b) and reals (c, d). Each call hands its arguments on unchanged.
void CallValues(Case &one) {
    REGISTER_KERNEL(DeviceType::kCPU, ProbeReals, probe_kernels::Reals);
    const int64_t a = one.Whole("wholes", 0);
    const int b = static_cast<int>(one.Whole("wholes", 1));
    const float c = one.Real("reals", 0);
    const double d = one.Real("reals", 1);
    one.SaveNumber("weighted", Kernel(DeviceType::kCPU, "ProbeWeighted").Call<int64_t>(a, b, c));
    one.Save("reals", Numbers<double>("F64", {Kernel(DeviceType::kCPU, "ProbeReals").Call<double>(c, d)}));
}

// Pointers, and class types taken by const reference as the framework's own kernels take them.
void CallReferences(Case &one) {
    REGISTER_KERNEL(DeviceType::kCPU, ProbeDot, probe_kernels::Dot);
    REGISTER_KERNEL(DeviceType::kCPU, ProbePass, probe_kernels::Pass);
    float target = one.Real("reals", 0);
    Kernel(DeviceType::kCPU, "ProbeAccumulate").Call<void>(&target, one.Real("reals", 1));
    one.Save("accumulated", Numbers<float>("F32", {target}));
    const auto &a = one.Input("a");
    const auto &b = one.Input("b");
    const std::vector<float> first(a.As<float>(), a.As<float>() + a.Count<float>());
    const std::vector<float> second(b.As<float>(), b.As<float>() + b.Count<float>());
    one.Save("dot", Numbers<float>("F32", {Kernel(DeviceType::kCPU, "ProbeDot").Call<float>(first, second)}));
    const auto tensor = probe::ToTensor(a, Device(DeviceType::kCPU, 0));
    probe::SaveTensor(one, "passed", Kernel(DeviceType::kCPU, "ProbePass").Call<std::shared_ptr<Tensor>>(tensor));
}

// One name on two devices is two kernels.
void TwoDevices(Case &one) {
    REGISTER_KERNEL(DeviceType::kCPU, ProbeTwoDevices, probe_kernels::OnCpu);
    const std::string name = one.arguments.Get("name");
    Dispatcher::Instance().Register({DeviceType::kCUDA, "ProbeTwoDevices"}, probe_kernels::OnCuda);
    Dispatcher::Instance().Register({DeviceType::kCPU, name}, probe_kernels::First);
    Dispatcher::Instance().Register({DeviceType::kCUDA, name}, probe_kernels::Second);
    const int a = static_cast<int>(one.Whole("wholes", 1));
    one.Save("results", Numbers<int64_t>("I64", {Kernel(DeviceType::kCPU, "ProbeTwoDevices").Call<int>(a),
                                                 Kernel(DeviceType::kCUDA, "ProbeTwoDevices").Call<int>(a),
                                                 Kernel(DeviceType::kCPU, name).Call<int>(a),
                                                 Kernel(DeviceType::kCUDA, name).Call<int>(a)}));
}

// The cases below must end the process. What they hold before that is kept, so that the judge can tell a
// refusal from a crash on the way.
void DuplicateByName(Case &one) {
    const std::string name = one.arguments.Get("name");
    Dispatcher::Instance().Register({DeviceType::kCPU, name}, probe_kernels::First);
    one.SaveNumber("first", Kernel(DeviceType::kCPU, name).Call<int>(static_cast<int>(one.Whole("wholes", 1))));
    one.Keep();
    Dispatcher::Instance().Register({DeviceType::kCPU, name}, probe_kernels::Second);
}

void DuplicateByMacro(Case &one) {
    one.SaveNumber("first", Kernel(DeviceType::kCPU, "ProbeNamespaceScope")
                                .Call<int>(static_cast<int>(one.Whole("wholes", 1))));
    one.Keep();
    Dispatcher::Instance().Register({DeviceType::kCPU, "ProbeNamespaceScope"}, probe_kernels::First);
}

void MissingKernel(Case &one) {
    one.SaveNumber("first", one.Whole("wholes", 1));
    one.Keep();
    Dispatcher::Instance().GetKernel({DeviceType::kCPU, one.arguments.Get("name")});
}

void Dispatch(Case &one) {
    const std::map<std::string, void (*)(Case &)> cases
        = {{"call_values", CallValues},         {"call_references", CallReferences},
           {"two_devices", TwoDevices},         {"duplicate_by_name", DuplicateByName},
           {"duplicate_by_macro", DuplicateByMacro}, {"missing_kernel", MissingKernel}};
    cases.at(one.name)(one);
}

// A case for each kernel of the framework, "cpu:MatmulForward": ends well where it is registered. There is no
// other way to ask, since asking for a kernel that is missing ends the process.
void Registered(Case &one) {
    const size_t colon = one.name.find(':');
    const auto device = one.name.substr(0, colon) == "cuda" ? DeviceType::kCUDA : DeviceType::kCPU;
    Dispatcher::Instance().GetKernel({device, one.name.substr(colon + 1)});
}
} // namespace

int main(int argc, char **argv) {
    return probe::Main(argc, argv, {{"dispatcher", Dispatch}, {"registered", Registered}});
}
