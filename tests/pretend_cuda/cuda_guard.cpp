// What torch's CPU build lacks for tensors that claim to be on a GPU: a device guard and hooks for CUDA, which do
// nothing (autograd asks for both), the timer of DistributedDataParallel, and tensors with the label cuda for
// torch.compile.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
thread_local c10::DeviceIndex current = 0;

struct PretendGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    current = d.index();
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(CUDA, current); }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    auto index = d.index() < 0 ? current : d.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, index));
  }
  c10::Stream getNewStream(c10::Device d, int = 0) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 16; }
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *e = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar registered(CUDA, new PretendGuard());

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 16; }
  c10::DeviceIndex deviceCount() const override { return 16; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto old = current;
    current = d;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
}  // namespace

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// A tensor whose memory is a CPU tensor's and that claims to be on a GPU, without kernels: an input for torch.compile.
at::Tensor label(const at::Tensor& t, int64_t index) {
  auto device = c10::Device(CUDA, static_cast<c10::DeviceIndex>(index));
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.nbytes() ? t.storage().nbytes() : 0,
                       c10::DataPtr(t.storage().mutable_data(), new at::Tensor(t),
                                    [](void* p) { delete static_cast<at::Tensor*>(p); }, device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}

TORCH_LIBRARY(pretend, m) { m.def("label(Tensor t, int index) -> Tensor", label); }

// DistributedDataParallel times its buckets.
namespace c10d {
class PretendTimer : public Timer {
 public:
  explicit PretendTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendTimer)
}  // namespace c10d

// Kernels for labelled tensors: the CPU's, on the same memory. Inductor folds constants on the device.
c10::IValue to_cpu(const c10::IValue& v) {
  if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cuda()) {
    auto t = v.toTensor();
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(at::kCPU));
  }
  if (v.isDevice() && v.toDevice().is_cuda()) return c10::IValue(c10::Device(at::kCPU));
  if (v.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : v.toTensorList()) made.push_back(to_cpu(t).toTensor());
    return made;
  }
  return v;
}

c10::IValue to_cuda(const c10::IValue& v) {
  if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cpu()) return label(v.toTensor(), 0);
  if (v.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : v.toTensorList()) made.push_back(label(t, 0));
    return made;
  }
  return v;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto args = torch::jit::pop(*stack, schema.arguments().size());
  bool leaves = false;
  for (const auto& v : args) {
    leaves |= v.isDevice() && v.toDevice().is_cpu();
    stack->push_back(to_cpu(v));
  }
  op.callBoxed(stack);
  auto outs = torch::jit::pop(*stack, schema.returns().size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    c10::IValue out = leaves ? outs[i] : to_cuda(outs[i]);
    if (alias && alias->isWrite())
      for (size_t k = 0; k < args.size(); ++k)
        if (const auto* theirs = schema.arguments()[k].alias_info(); theirs && *theirs == *alias) out = args[k];
    stack->push_back(out);
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Which attention a GPU takes: 1 flash, 2 memory-efficient, 0 composed.
int64_t chosen = 0;
int64_t choose(const at::Tensor& q, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double,
               bool, std::optional<double>, bool) {
  if (!chosen) return 0;
  bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  return half && !(mask && mask->defined()) ? chosen : 2;
}
void use_attention(int64_t kind) {
  chosen = kind;
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}
TORCH_LIBRARY_FRAGMENT(pretend, m) { m.def("use_attention(int kind) -> ()", use_attention); }
