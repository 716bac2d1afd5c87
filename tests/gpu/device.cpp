// A "cuda" device for a CPU build of torch: tensors in host memory, computed by the CPU's kernels, at once.
//
// What only a GPU does wrong is made visible. Fresh memory is NaN. A copy to pinned memory arrives when the host waits
// for it, not before. Memory lent to a collective may not be touched. What makes the host wait is told to Python, which
// may refuse it. tests/gpu/simulated.py builds and loads this before torch, and answers `torch.cuda`.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {
using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::Stream, c10::SymIntArrayRef;
constexpr auto GPU = c10::DeviceType::CUDA;

struct Lent { char *begin, *end; bool written; std::string by; };  // to a collective that has not been waited for
struct OnItsWay { Tensor host, then; bool to_host; };              // a copy between pinned memory and the device

thread_local DeviceIndex current = 0;
constexpr DeviceIndex num_devices = 8;
std::mutex lock;  // of all that follows
std::map<DeviceIndex, int64_t> live, peak;
std::set<int64_t> contexts;  // devices that this process has touched: each costs half a GB of a real one
std::map<char*, size_t> pinned;
std::multimap<int64_t, Lent> lent;
std::string freed;  // whose memory was freed last: a free cannot raise
std::deque<OnItsWay> on_their_way;
int64_t landed = 0;  // copies, since the start
int (*told)(const char* kind, const char* what) = nullptr;

void tell(const char* kind, const std::string& what) {
  TORCH_CHECK(!told || !told(kind, what.c_str()), kind, " where the host must not wait for the device: ", what);
}
void enter(DeviceIndex device) {
  std::lock_guard hold(lock);
  contexts.insert(device);
}
void free_pinned(void* memory) {
  { std::lock_guard hold(lock); pinned.erase((char*)memory); }
  std::free(memory);
}
struct Block { char* memory; size_t size; DeviceIndex device; };
void free_block(void* context) {
  auto* block = (Block*)context;
  std::lock_guard hold(lock);
  live[block->device] -= block->size;
  for (auto& [id, one] : lent)
    if (one.begin < block->memory + block->size && block->memory < one.end) {
      freed = one.by;
      return;  // it is kept, since the thread that plays the collective would crash
    }
  std::free(block->memory);
  delete block;
}
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    enter(current);
    if (!n) return {nullptr, Device(GPU, current)};
    size_t size = (n + 511) / 512 * 512;  // as torch's own allocator does
    auto* block = new Block{(char*)std::aligned_alloc(512, size), size, current};
    std::memset(block->memory, 0xff, size);  // NaN in every floating type
    std::lock_guard hold(lock);
    peak[current] = std::max(peak[current], live[current] += size);
    return {block->memory, block, &free_block, Device(GPU, current)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} device_memory;
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    enter(current);
    size_t size = (n + 511) / 512 * 512 + 512;
    char* memory = (char*)std::aligned_alloc(512, size);
    std::memset(memory, 0xff, size);
    std::lock_guard hold(lock);
    pinned[memory] = size;
    return {memory, memory, &free_pinned, Device(c10::kCPU)};
  }
  static bool has(const void* place) {
    std::lock_guard hold(lock);
    auto after = pinned.upper_bound((char*)place);
    return after != pinned.begin() && (char*)place < std::prev(after)->first + std::prev(after)->second;
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return GPU; }
  Device exchangeDevice(Device to) const override { return {GPU, std::exchange(current, to.index())}; }
  Device getDevice() const override { return {GPU, current}; }
  void setDevice(Device to) const override { current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  Stream getStream(Device of) const override { return Stream(Stream::DEFAULT, of); }
  Stream exchangeStream(Stream to) const override { return to; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override { *event = (void*)1; }
};

size_t span(const Tensor& t) { return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size()); }

// Bytes that a collective has may not be read if it writes them, nor be written at all.
void touch(const Tensor& t, bool writes, const std::string& who) {
  if (!t.defined() || !t.is_cuda() || !t.numel()) return;
  auto* begin = (char*)t.data_ptr();
  TORCH_CHECK(begin, who, ": the memory of a tensor was freed");
  std::lock_guard hold(lock);
  for (auto& [id, one] : lent)
    TORCH_CHECK(begin >= one.end || one.begin >= begin + span(t) || !(writes || one.written), who,
                writes ? " writes to" : " reads", " memory of ", one.by, ", which has not been waited for");
}

// The copies up to that one are whole: the host has waited.
void land(int64_t until) {
  while (true) {
    OnItsWay copy;
    {
      std::lock_guard hold(lock);
      if (landed >= until || on_their_way.empty()) return;
      copy = std::move(on_their_way.front());
      on_their_way.pop_front();
      landed++;
    }
    if (copy.to_host) copy.host.copy_(copy.then);
    else TORCH_CHECK(!std::memcmp(copy.host.data_ptr(), copy.then.data_ptr(), copy.then.nbytes()),
                     "pinned memory was written to before its copy to the device had been waited for");
  }
}
int64_t issued() { std::lock_guard hold(lock); return landed + on_their_way.size(); }

// The same memory as a tensor of the host. An empty one has its own: an operation may resize it.
Tensor host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = at::TensorOptions().dtype(t.dtype());
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}
Tensor device_like(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}
Tensor to_device(const Tensor& t) {
  auto out = device_like(t.sizes(), t.strides(), t.scalar_type());
  if (t.numel()) std::memcpy(out.data_ptr(), t.data_ptr(), span(t));
  return out;
}

// Operations whose result's shape, or whose result, is for the host.
const std::set<std::string> READS{"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "unique_consecutive", "_unique", "bincount", "repeat_interleave", "_assert_async"};
const std::set<std::string> INDEXED{"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index"};

template <class Visit> void visit(c10::IValue& value, Visit each) {  // every tensor of an argument or a result
  if (value.isTensor()) value = each(value.toTensor());
  else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& t : value.toTensorVector()) list.push_back(each(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(each(*t)) : t);
    value = list;
  }
}

void by_the_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto name = schema.name().substr(schema.name().find("::") + 2);
  size_t n = schema.arguments().size(), base = stack->size() - n;
  std::vector<std::pair<Tensor, Tensor>> ours;  // on the host, on the device
  std::optional<DeviceIndex> where;
  bool by_mask = false;
  std::string on_host;  // an argument that a kernel of the device cannot read
  for (size_t i = 0; i < n; i++) {
    auto& value = (*stack)[base + i];
    auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite(), indexes = INDEXED.count(name) && i == 1;
    visit(value, [&](const Tensor& t) -> Tensor {
      if (!t.defined()) return t;
      by_mask |= indexes && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
      if (!t.is_cuda()) {
        if (indexes) tell("copy from pageable memory", "an index");
        else if (t.dim() || writes) on_host = schema.arguments()[i].name();
        return t;
      }
      TORCH_CHECK(where.value_or(t.get_device()) == t.get_device(), name, ": Expected all tensors to be on the same "
                  "device, but found at least two devices, cuda:", int(*where), " and cuda:", int(t.get_device()));
      where = t.get_device();
      touch(t, writes, name);
      ours.emplace_back(host(t), t);
      return ours.back().first;
    });
    TORCH_CHECK(!value.isGenerator() || value.toGenerator().device().is_cuda(), name, ": Expected a 'cuda' device type for "
                "generator but found 'cpu'");
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!where) where = value.toDevice().has_index() ? value.toDevice().index() : current;
      value = Device(c10::kCPU);
    }
  }
  TORCH_CHECK(on_host.empty(), name, ": Expected all tensors to be on the same device, but found at least two devices, "
              "cuda and cpu (", on_host, ")");
  if (READS.count(name) || by_mask) {
    tell("host read", by_mask ? name + " by a mask" : name);
    land(issued());
  }
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (name == "_local_scalar_dense" || name == "equal") return;
  auto before = std::exchange(current, where.value_or(current));
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto* alias = schema.returns()[i - (stack->size() - schema.returns().size())].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), name, " returns a view: give the simulated device a kernel of its own");
    visit((*stack)[i], [&](const Tensor& t) -> Tensor {
      if (!t.defined()) return t;
      for (auto& [here, there] : ours)
        if (here.is_same(t)) {
          if (here.sizes() != there.sizes()) {  // an out= that was resized
            auto grown = to_device(here);
            there.unsafeGetTensorImpl()->set_storage_keep_dtype(grown.storage());
            there.unsafeGetTensorImpl()->set_sizes_and_strides(grown.sizes(), grown.strides(), 0);
          }
          return there;
        }
      return to_device(t);
    });
  }
  current = before;
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> on,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_generic_symint(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                          c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> on, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(on);
  return device_like(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                    offset ? offset->expect_int() : self.storage_offset());
  return view;
}
Tensor meta(const Tensor& self) {
  return at::empty_strided(self.sizes(), self.strides(), at::TensorOptions().dtype(self.dtype()).device(at::kMeta));
}
Tensor as_like(const Tensor& self, const Tensor& like) {
  return as_strided(self, c10::fromIntArrayRefSlow(like.sizes()), c10::fromIntArrayRefSlow(like.strides()), self.storage_offset());
}
Tensor view(const Tensor& self, SymIntArrayRef size) { return as_like(self, meta(self).view(C10_AS_INTARRAYREF_SLOW(size))); }
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return as_like(self, meta(self).unfold(dim, size, step));
}
Tensor view_as_real(const Tensor& self) {
  auto like = at::view_as_real(meta(self));
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), 2 * self.storage_offset());
  return view;
}
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) { return as_strided(self, size, stride, {}); }

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  touch(self, true, "copy_");
  touch(src, false, "copy_");
  Tensor to = host(self), from = host(src);
  bool to_host = src.is_cuda() && !self.is_cuda(), from_host = self.is_cuda() && !src.is_cuda();
  if (to_host && non_blocking && self.is_pinned()) {
    auto then = from.to(to.scalar_type(), false, true).contiguous();
    if (to.is_contiguous()) std::memset(to.data_ptr(), 0xff, to.nbytes());
    std::lock_guard hold(lock);
    on_their_way.push_back({to, then, true});
    return self;
  }
  if (to_host && src.numel()) {
    tell("host read", "copy_ to the host");
    land(issued());
  }
  if (from_host && src.numel()) {
    bool pinned = src.is_pinned();
    if (!pinned || !non_blocking) tell(pinned ? "blocking copy" : "copy from pageable memory", "copy_ to the device");
    else if (src.is_contiguous()) {
      std::lock_guard hold(lock);
      on_their_way.push_back({src, src.clone(), false});
    }
  }
  to.copy_(from);
  return self;
}
const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  auto& storage = impl->unsafe_storage();
  auto need = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (storage.nbytes() < need) {
    auto grown = device_memory.allocate(need);
    if (storage.nbytes()) std::memcpy(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(need);
  }
  return self;
}
Tensor& set_(Tensor& self, at::Storage source, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
Tensor mm_widened(const Tensor& a, const Tensor& b, at::ScalarType out) { return at::mm(a.to(out), b.to(out)); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("view_as_real", TORCH_FN(view_as_real));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("mm.dtype", TORCH_FN(mm_widened));
  // Every other one that has a kernel of the CPU's takes it, not what torch makes up of several: bits would differ.
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
      m.impl((name.name + (name.overload_name.empty() ? "" : ".") + name.overload_name).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }
TORCH_LIBRARY(simulated, m) {
  m.def("host(Tensor x) -> Tensor", [](const Tensor& x) { return host(x); });
  m.def("set_device(int device) -> ()", [](int64_t device) { current = device; enter(device); });
  m.def("current_device() -> int", []() { return int64_t(current); });
  m.def("device_count() -> int", []() { return int64_t(num_devices); });
  m.def("live(int device) -> int", [](int64_t device) { std::lock_guard hold(lock); return live[device]; });
  m.def("peak(int device) -> int", [](int64_t device) { std::lock_guard hold(lock); return peak[device]; });
  m.def("reset_peak(int device) -> ()", [](int64_t device) { std::lock_guard hold(lock); peak[device] = live[device]; });
  m.def("contexts() -> int[]", []() { std::lock_guard hold(lock); return std::vector<int64_t>(contexts.begin(), contexts.end()); });
  m.def("enter() -> ()", []() { enter(current); });
  m.def("pin(int place, int size) -> ()", [](int64_t place, int64_t size) { std::lock_guard hold(lock); pinned[(char*)place] = size; });
  m.def("issued() -> int", []() { return issued(); });
  m.def("landed() -> int", []() { std::lock_guard hold(lock); return landed; });
  m.def("land(int until) -> ()", [](int64_t until) { land(until); });
  m.def("touch(Tensor x, bool writes, str who) -> ()", [](const Tensor& x, bool writes, const std::string& who) { touch(x, writes, who); });
  m.def("lend(Tensor x, bool written, str by, int id) -> ()", [](const Tensor& x, bool written, const std::string& by, int64_t id) {
    auto* begin = (char*)x.data_ptr();
    std::lock_guard hold(lock);
    lent.insert({id, {begin, begin + span(x), written, by}});
  });
  m.def("resize(Tensor x, int size) -> ()", [](const Tensor& x, int64_t size) {  // x.untyped_storage().resize_(size)
    auto* storage = x.storage().unsafeGetStorageImpl();
    auto memory = device_memory.allocate(size);
    if (size_t kept = std::min(size_t(size), storage->nbytes())) std::memcpy(memory.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(size);
  });
  m.def("give_back(int id) -> str", [](int64_t id) {  // also: by which collective memory was in use that has been freed
    std::lock_guard hold(lock);
    lent.erase(id);
    return std::exchange(freed, "");
  });
}
}  // namespace

extern "C" void on_told(int (*callback)(const char*, const char*)) { told = callback; }

namespace at {
struct SimulatedHooks final : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex deviceCount() const override { return num_devices; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* place) const override { return PinnedMemory::has(place); }
  Device getDeviceFromPtr(void*) const override { return {GPU, current}; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return globalContext().defaultGenerator(kCPU); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
REGISTER_ALLOCATOR(GPU, &device_memory)
static HostAllocatorRegistry<GPU> host_allocator(&pinned_memory);
}  // namespace at
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, Guard); }
