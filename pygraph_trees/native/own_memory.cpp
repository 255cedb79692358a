/* The memory of a function's outputs: pygraph_trees.native._fast_path.OwnMemory. */

#include <ATen/CachedTensorUtils.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Storage.h>

namespace {

constexpr uint8_t ALIVE_IN_A_ROW = 2; // calls after which memory is no longer kept
constexpr uint8_t DEAD_IN_A_ROW = 4;  // calls after which it is kept again
constexpr size_t BLOCKS_AHEAD = 24;   // blocks

struct OwnMemory;
std::vector<OwnMemory *> all; // of the process, protected by the GIL
unsigned long long calls = 0;

/* Sizes, strides, offset in elements, and type of a tensor in a storage. */
struct Strided {
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    caffe2::TypeMeta dtype;

    Strided() = default;
    Strided(std::vector<int64_t> sizes_, std::vector<int64_t> strides_, int64_t offset_, caffe2::TypeMeta dtype_)
        : sizes(std::move(sizes_)), strides(std::move(strides_)), offset(offset_), dtype(dtype_) {
        if (sizes.size() != strides.size())
            throw py::value_error("expected as many strides as sizes");
    }

    /* Takes (sizes, strides, offset, dtype). */
    static Strided of(const py::handle &given) {
        using Numbers = std::vector<int64_t>;
        const auto [sizes, strides, offset, dtype] =
            given.cast<std::tuple<Numbers, Numbers, int64_t, at::ScalarType>>();
        return {sizes, strides, offset, c10::scalarTypeToTypeMeta(dtype)};
    }

    bool operator==(const Strided &other) const {
        return sizes == other.sizes && strides == other.strides && offset == other.offset && dtype == other.dtype;
    }
};

at::Tensor tensor_in(c10::Storage storage, const Strided &layout) {
    const c10::DispatchKeySet keys(
        c10::computeDispatchKey(c10::typeMetaToScalarType(layout.dtype), std::nullopt, storage.device()));
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, layout.dtype);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
    return made;
}

const c10::StorageImpl *storage_of(PyObject *base) {
    return THPVariable_Unpack(base).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

struct Block {
    size_t nbytes = 0;
    Strided layout;     // of its tensor, which begins where the storage does
    bool lends = false; // whether the tensor itself is returned to code that only accumulates gradients
    bool holds = true;  // whether the memory is kept for the next call
    PyObject *base = nullptr; // the tensor, which only the block references while it is free; NULL without memory
    Known known = {};         // of the tensor, for prefetching
    const void *address = nullptr;
    c10::DeleterFnPtr deleter = nullptr;
    c10::Stream stream{c10::Stream::DEFAULT, c10::Device(c10::kCPU)}; // on which it was allocated
    // Of a call that gave it away.
    c10::weak_intrusive_ptr<c10::StorageImpl> last{c10::intrusive_ptr<c10::StorageImpl>()};
    bool is_used = false; // whether another stream may use it: see record_stream
    bool is_new = false;  // whether no call that was launched has used the memory
    uint8_t alive = 0;    // consecutive calls at which the program still had the last output
    uint8_t dead = 0;     // consecutive calls at which it no longer had it, although the memory was not kept
};

/* Whether the storage has the block's memory. Torch changes the deleter of memory that other processes share. */
bool is_whole(const Block &block) {
    const c10::StorageImpl *storage = storage_of(block.base);
    return storage->data() == block.address && storage->nbytes() == block.nbytes &&
           storage->data_ptr().get_deleter() == block.deleter;
}

/* Memory of a function's outputs outside of the graph pool, which replays write again while it is dead. */
struct OwnMemory {
    c10::Device device;
    std::vector<Block> blocks;
    std::vector<Ref> dropped;                       // references to release once the call has no turn
    std::shared_ptr<Counter> allocated, given_away; // blocks so far
    unsigned long long used = 0;                    // the number of its latest call, among all calls
    bool may_hold = true;
    bool is_taking = false; // a finalizer may run meanwhile

    explicit OwnMemory(const py::kwargs &given)
        : device(given["like"].cast<at::Tensor>().device()), allocated(Counter::of(given["allocated"])),
          given_away(Counter::of(given["given_away"])) {
        using Numbers = std::vector<int64_t>;
        using Described = std::tuple<size_t, Numbers, Numbers, at::ScalarType, bool, bool>;
        const auto described = given["blocks"].cast<std::vector<Described>>();
        for (const auto &[nbytes, sizes, strides, dtype, lends, holds] : described) {
            blocks.push_back({nbytes, {sizes, strides, 0, c10::scalarTypeToTypeMeta(dtype)}, lends, holds});
            if (lends)
                at::caching::set_cached_tensors_enabled(true);
        }
        all.push_back(this);
    }

    ~OwnMemory() {
        std::erase(all, this);
        release();
    }
    OwnMemory(const OwnMemory &) = delete;
    OwnMemory &operator=(const OwnMemory &) = delete;

    /* Makes every block free for this call, on the current stream. False without memory; then `error` says why.
       Blocks that the program still uses are given to it, and others allocated. */
    bool take(std::string *error) {
        struct Taking {
            bool &is;
            ~Taking() { is = false; }
        } taking{is_taking = true};
        used = ++calls;
        const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
        for (size_t i = 0; i < blocks.size(); i++) {
            for (size_t next = i == 0 ? 0 : i + BLOCKS_AHEAD; next <= i + BLOCKS_AHEAD && next < blocks.size(); next++)
                blocks[next].known.load_references();
            Block &block = blocks[i];
            if (block.base != nullptr) {
                if (block.stream == stream && is_free(i)) {
                    if (!block.is_new) // else a call was not launched
                        block.alive = 0;
                    continue;
                }
                if (!is_dead(block.base) && ++block.alive >= ALIVE_IN_A_ROW)
                    block.holds = false;
                block.dead = 0;
                given_away->value++;
                give_away(&block);
            } else if (!block.holds) {
                block.dead = block.last.expired() ? static_cast<uint8_t>(block.dead + 1) : 0;
                block.holds = may_hold && block.dead >= DEAD_IN_A_ROW;
                block.alive = 0;
            }
            if (!allocate(&block, stream, error))
                return false;
        }
        return true;
    }

    /* Whether a block is still free, after other code may have run. */
    bool is_free(size_t number) const {
        const Block &block = blocks[number];
        return !block.is_used && is_whole(block) && is_dead(block.base);
    }

    /* Ends a call that was launched. */
    void launched() {
        for (Block &block : blocks)
            block.is_new = false;
        for (Block &block : blocks)
            if (!block.holds && block.base != nullptr) {
                block.last = c10::weak_intrusive_ptr<c10::StorageImpl>(
                    THPVariable_Unpack(block.base).storage().getWeakStorageImpl());
                give_away(&block);
            }
    }

    /* Releases what was given away. */
    void drop() { const auto released = std::exchange(dropped, {}); }

    /* Drops all memory; what the program uses stays alive. */
    void release() {
        if (is_taking)
            return;
        for (Block &block : blocks)
            give_away(&block);
        drop();
    }

    void hold(bool may) {
        may_hold = may;
        for (Block &block : blocks)
            block.holds = block.holds && may;
    }

    /* The bytes of all blocks, or of those that are kept from call to call. */
    size_t nbytes(bool only_held) const {
        size_t sum = 0;
        for (const Block &block : blocks)
            sum += block.holds || !only_held ? block.nbytes : 0;
        return sum;
    }

    PyObject *item(uint64_t number) const { return number < blocks.size() ? blocks[number].base : nullptr; }

  private:
    bool allocate(Block *block, const c10::Stream &stream, std::string *error) {
        try {
            const c10::DeviceGuard guard(device);
            const c10::InferenceMode none(false);
            c10::Allocator *allocator = c10::GetAllocator(device.type());
            c10::DataPtr memory;
            {
                const py::gil_scoped_release others_run; // it may wait for the device, and the device for Python
                memory = allocator->allocate(block->nbytes);
            }
            Ref storage, base;
            {
                at::Tensor tensor =
                    tensor_in(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), block->nbytes,
                                                                    std::move(memory), allocator, true),
                              block->layout);
                storage = Ref(THPStorage_Wrap(tensor.storage())); // is_dead needs it; the storage keeps it
                base = Ref(THPVariable_Wrap(std::move(tensor)));
            }
            if (!storage || !base) {
                PyErr_Clear();
                *error = "no Python object could be made";
                return false;
            }
            block->known.note(base.get());
            block->address = storage_of(base.get())->data();
            block->deleter = storage_of(base.get())->data_ptr().get_deleter();
            block->base = base.release();
            block->stream = stream;
            block->is_used = false;
            block->is_new = true;
            allocated->value++;
            if (block->lends)
                try {
                    at::caching::add_cached_tensor(THPVariable_Unpack(block->base));
                } catch (const c10::Error &) { // torch has turned its registry off: AccumulateGrad copies the gradient
                }
            return true;
        } catch (const c10::OutOfMemoryError &raised) {
            *error = raised.what_without_backtrace();
        } catch (const c10::Error &raised) { // on the CPU, it has no type of its own
            if (!device.is_cpu())
                throw;
            *error = raised.what_without_backtrace();
        }
        return false;
    }

    void give_away(Block *block) {
        if (block->base == nullptr)
            return;
        // It is in no registry after torch has turned that off; then removing it would raise, in a destructor.
        const at::Tensor &base = THPVariable_Unpack(block->base);
        if (block->lends && at::caching::is_cached_tensor(base))
            at::caching::remove_cached_tensor(base);
        dropped.emplace_back(std::exchange(block->base, nullptr));
    }
};

/* A new tensor in the storage of another one. */
at::Tensor alias(PyObject *base, const Strided &layout) {
    return tensor_in(c10::Storage(THPVariable_Unpack(base).storage()), layout);
}

/* Notes that another stream uses a tensor's memory: a block there is not used again. */
void note_stream(const at::Tensor &tensor) {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const c10::StorageImpl *storage = impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
    if (storage == nullptr)
        return;
    for (OwnMemory *memory : all)
        for (Block &block : memory->blocks)
            if (block.address == storage->data()) // else nothing of it need be read
                block.is_used |= block.base != nullptr && storage_of(block.base) == storage;
}

/* The tensors of a call, one for each block. */
py::list take(OwnMemory &self) {
    py::list tensors(self.blocks.size()); // first: it may collect garbage
    if (std::string error; !self.take(&error)) {
        py::set_error(py::module_::import("torch").attr("OutOfMemoryError"), error.c_str());
        throw py::error_already_set();
    }
    for (size_t i = 0; i < self.blocks.size(); i++)
        tensors[i] = py::handle(self.blocks[i].base);
    return tensors;
}

py::object item(const OwnMemory &self, uint64_t number) {
    PyObject *base = self.item(number);
    return base == nullptr ? py::none() : py::reinterpret_borrow<py::object>(base);
}

at::Tensor alias_of_block(const OwnMemory &self, uint64_t number, const py::object &view) {
    PyObject *base = self.item(number);
    if (base == nullptr)
        throw py::index_error("there is no such block, or it has no memory");
    return alias(base, view.is_none() ? self.blocks[number].layout : Strided::of(view));
}

void declare_own_memory(py::module_ &module) {
    declare<OwnMemory>(module, "OwnMemory") // native/DESIGN.md describes the members
        .def(py::init<const py::kwargs &>())
        .def("take", take)
        .def("finish", [](OwnMemory &self) { self.launched(), self.drop(); })
        .def("release", &OwnMemory::release)
        .def("hold", &OwnMemory::hold)
        .def("alias", alias_of_block)
        .def("item", item)
        .def_readonly("used", &OwnMemory::used)
        .def_property_readonly("nbytes", [](const OwnMemory &self) { return self.nbytes(false); })
        .def_property_readonly("held_bytes", [](const OwnMemory &self) { return self.nbytes(true); });
}

} // namespace
