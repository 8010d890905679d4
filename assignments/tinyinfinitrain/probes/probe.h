// What the probes need of the student's framework: tensors from the host's arrays and back.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#ifdef USE_CUDA
#include "cuda_runtime_api.h"
#endif

#include "infini_train/include/device.h"
#include "infini_train/include/tensor.h"

#include "cases.h"

namespace probe {

using TensorPtr = std::shared_ptr<infini_train::Tensor>;

inline infini_train::Device DeviceOf(const Case &one) {
    const bool cuda = one.arguments.Get("device", "cpu") == "cuda";
    return infini_train::Device(cuda ? infini_train::DeviceType::kCUDA : infini_train::DeviceType::kCPU, 0);
}

// Copies between host and tensor, whichever device the tensor is on.
inline void CopyIn(const void *source, const TensorPtr &tensor) {
    if (tensor->GetDevice().IsCPU()) {
        std::memcpy(tensor->DataPtr(), source, tensor->SizeInBytes());
        return;
    }
#ifdef USE_CUDA
    cudaMemcpy(tensor->DataPtr(), source, tensor->SizeInBytes(), cudaMemcpyHostToDevice);
#endif
}

inline void CopyOut(const TensorPtr &tensor, void *target) {
    if (tensor->GetDevice().IsCPU()) {
        std::memcpy(target, tensor->DataPtr(), tensor->SizeInBytes());
        return;
    }
#ifdef USE_CUDA
    cudaMemcpy(target, tensor->DataPtr(), tensor->SizeInBytes(), cudaMemcpyDeviceToHost);
#endif
}

inline TensorPtr ToTensor(const Array &array, const infini_train::Device &device) {
    using infini_train::DataType;
    const DataType dtype = array.dtype == "I64" ? DataType::kINT64 : DataType::kFLOAT32;
    auto tensor = std::make_shared<infini_train::Tensor>(array.shape, dtype, device);
    CopyIn(array.bytes.data(), tensor);
    return tensor;
}

inline TensorPtr InputTensor(const Case &one, const std::string &key) {
    return ToTensor(one.Input(key), DeviceOf(one));
}

inline std::string DtypeName(infini_train::DataType dtype) {
    using infini_train::DataType;
    static const std::map<DataType, std::string> names
        = {{DataType::kUINT8, "U8"},      {DataType::kINT8, "I8"},     {DataType::kUINT16, "U16"},
           {DataType::kINT16, "I16"},     {DataType::kUINT32, "U32"},  {DataType::kINT32, "I32"},
           {DataType::kUINT64, "U64"},    {DataType::kINT64, "I64"},   {DataType::kBFLOAT16, "BF16"},
           {DataType::kFLOAT16, "F16"},   {DataType::kFLOAT32, "F32"}, {DataType::kFLOAT64, "F64"}};
    const auto found = names.find(dtype);
    return found == names.end() ? "U8" : found->second;
}

// Saves a tensor, and where it lay. No tensor, or one that holds nothing, is saved as an empty one: a task
// that is not filled in hands back just that.
inline void SaveTensor(Case &one, const std::string &key, const TensorPtr &tensor) {
    if (!tensor || tensor->NumElements() == 0) {
        one.Save(key, Array{"F32", {0}, {}});
        return;
    }
    Array array{DtypeName(tensor->Dtype()), tensor->Dims(), std::vector<uint8_t>(tensor->SizeInBytes())};
    CopyOut(tensor, array.bytes.data());
    one.Save(key, std::move(array));
    one.SaveNumber(key + ".on_cuda", tensor->GetDevice().IsCPU() ? 0 : 1);
}

inline void SaveTensor(Case &one, const std::string &key, const std::vector<TensorPtr> &tensors, size_t index) {
    SaveTensor(one, key, index < tensors.size() ? tensors[index] : nullptr);
}

} // namespace probe
