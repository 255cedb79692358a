/* The memory of a function's outputs: pygraph_trees.native._fast_path.OwnMemory, see own_memory.h. */

#include "fast_path.h"

#include <ATen/CachedTensorUtils.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Storage.h>

#include <structmember.h>

using namespace pygraph;

namespace {

using Block = OwnMemory::Block;

constexpr uint8_t ALIVE_IN_A_ROW = 2; // calls after which memory is no longer kept
constexpr uint8_t DEAD_IN_A_ROW = 4;  // calls after which it is kept again
constexpr size_t BLOCKS_AHEAD = 24;   // blocks

std::vector<OwnMemory::State *> all; // of the process, protected by the GIL
unsigned long long calls = 0;

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

/* Whether the storage has the block's memory. Torch changes the deleter of memory that other processes share. */
bool is_whole(const Block &block) {
    const c10::StorageImpl *storage = storage_of(block.base);
    return storage->data() == block.address && storage->nbytes() == block.nbytes &&
           storage->data_ptr().get_deleter() == block.deleter;
}

/* Other threads may run Python code while it exists. */
class WithoutLock {
  public:
    WithoutLock() : state(PyEval_SaveThread()) {}
    ~WithoutLock() { PyEval_RestoreThread(state); }
    WithoutLock(const WithoutLock &) = delete;
    WithoutLock &operator=(const WithoutLock &) = delete;

  private:
    PyThreadState *state;
};

OwnMemory::State *memory_of(PyObject *self) { return reinterpret_cast<OwnMemory *>(self)->state; }

} // namespace

bool OwnMemory::State::allocate(Block *block, const c10::Stream &stream, std::string *error) {
    try {
        const c10::DeviceGuard guard(device);
        const c10::InferenceMode none(false);
        c10::Allocator *allocator = c10::GetAllocator(device.type());
        c10::DataPtr memory;
        {
            const WithoutLock others_run; // the allocator may wait for the device, and the device for Python
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
        counter_in(allocated)->value++;
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

void OwnMemory::State::give_away(Block *block) {
    if (block->base == nullptr)
        return;
    // It is in no registry after torch has turned that off; then removing it would raise, in a destructor.
    if (const at::Tensor &base = THPVariable_Unpack(block->base); block->lends && at::caching::is_cached_tensor(base))
        at::caching::remove_cached_tensor(base);
    dropped.emplace_back(std::exchange(block->base, nullptr));
}

bool OwnMemory::State::take(std::string *error) {
    struct Taking {
        bool &is;
        ~Taking() { is = false; }
    } taking{is_taking = true};
    return take_all(error);
}

bool OwnMemory::State::take_all(std::string *error) {
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
            counter_in(given_away)->value++;
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

bool OwnMemory::State::is_free(size_t number) const {
    const Block &block = blocks[number];
    return !block.is_used && is_whole(block) && is_dead(block.base);
}

void OwnMemory::State::launched() {
    for (Block &block : blocks)
        block.is_new = false;
    for (Block &block : blocks)
        if (!block.holds && block.base != nullptr) {
            block.last = c10::weak_intrusive_ptr<c10::StorageImpl>(
                THPVariable_Unpack(block.base).storage().getWeakStorageImpl());
            give_away(&block);
        }
}

PyObject *pygraph::alias(PyObject *base, const Strided &layout) {
    return THPVariable_Wrap(tensor_in(c10::Storage(THPVariable_Unpack(base).storage()), layout));
}

bool pygraph::take_strided(PyObject *sizes, PyObject *strides, long long offset, PyObject *dtype, Strided *layout) {
    if (!is_tuple(sizes) || !is_tuple(strides))
        return false;
    if (!THPDtype_Check(dtype)) {
        PyErr_SetString(PyExc_TypeError, "expected a dtype");
        return false;
    }
    for (auto [tuple, numbers] : {std::pair{sizes, &layout->sizes}, std::pair{strides, &layout->strides}})
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
            numbers->push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    layout->offset = offset;
    layout->dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype *>(dtype)->scalar_type);
    if (PyErr_Occurred() == nullptr && layout->sizes.size() != layout->strides.size())
        PyErr_SetString(PyExc_ValueError, "expected as many strides as sizes");
    return PyErr_Occurred() == nullptr;
}

void pygraph::note_stream(const at::Tensor &tensor) {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const c10::StorageImpl *storage = impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
    if (storage == nullptr)
        return;
    for (OwnMemory::State *state : all)
        for (Block &block : state->blocks)
            if (block.address == storage->data()) // else nothing of it need be read
                block.is_used |= block.base != nullptr && storage_of(block.base) == storage;
}

namespace {

PyObject *make_own_memory(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"like", "blocks", "allocated", "given_away", nullptr};
    PyObject *like, *given, *allocated, *given_away;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOO", const_cast<char **>(known), &like, &given, &allocated,
                                     &given_away))
        return nullptr;
    if (counter_in(allocated) == nullptr || counter_in(given_away) == nullptr)
        return PyErr_Format(PyExc_TypeError, "expected two Counter objects");
    const at::Tensor *example = tensor_of(like);
    Items items;
    if (example == nullptr || !items.take(given))
        return nullptr;
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<OwnMemory *>(made.get())->state = new OwnMemory::State;
    state->device = example->device();
    state->allocated = Py_NewRef(allocated);
    state->given_away = Py_NewRef(given_away);
    for (Py_ssize_t i = 0; i < items.count; i++) {
        unsigned long long nbytes = 0;
        PyObject *sizes, *strides, *dtype;
        int lends = 0, holds = 0;
        Block &block = state->blocks.emplace_back();
        if (!is_tuple(items.at[i]) ||
            !PyArg_ParseTuple(items.at[i], "KOOOpp", &nbytes, &sizes, &strides, &dtype, &lends, &holds) ||
            !take_strided(sizes, strides, 0, dtype, &block.layout))
            return nullptr;
        block.nbytes = nbytes;
        block.lends = lends != 0;
        block.holds = holds != 0;
    }
    if (std::any_of(state->blocks.begin(), state->blocks.end(), [](const Block &block) { return block.lends; }))
        at::caching::set_cached_tensors_enabled(true);
    all.push_back(state);
    return made.release();
}

int own_memory_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return 0;
}

void own_memory_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (auto *state = std::exchange(reinterpret_cast<OwnMemory *>(self)->state, nullptr); state != nullptr) {
        std::erase(all, state);
        state->release();
        Py_XDECREF(state->allocated);
        Py_XDECREF(state->given_away);
        delete state;
    }
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *take(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        OwnMemory::State *state = memory_of(self);
        Ref list(PyList_New(static_cast<Py_ssize_t>(state->blocks.size()))); // first: it may collect garbage
        std::string error;
        if (list && !state->take(&error)) {
            Ref torch(PyImport_ImportModule("torch"));
            if (Ref kind(torch ? PyObject_GetAttrString(torch.get(), "OutOfMemoryError") : nullptr); kind)
                PyErr_SetString(kind.get(), error.c_str());
            return nullptr;
        }
        for (size_t i = 0; list && i < state->blocks.size(); i++)
            PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(state->blocks[i].base));
        return list.release();
    });
}

PyObject *finish(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        memory_of(self)->launched();
        auto dropped = std::exchange(memory_of(self)->dropped, {});
        dropped.clear();
        Py_RETURN_NONE;
    });
}

PyObject *release(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        memory_of(self)->release();
        Py_RETURN_NONE;
    });
}

PyObject *hold(PyObject *self, PyObject *may) {
    const int answer = PyObject_IsTrue(may);
    if (answer < 0)
        return nullptr;
    memory_of(self)->may_hold = answer != 0;
    for (Block &block : memory_of(self)->blocks)
        block.holds = block.holds && answer != 0;
    Py_RETURN_NONE;
}

PyObject *make_alias(PyObject *self, PyObject *arguments) {
    return translated([&]() -> PyObject * {
        unsigned long long number = 0;
        long long offset = 0;
        PyObject *view, *sizes, *strides, *dtype;
        if (!PyArg_ParseTuple(arguments, "KO", &number, &view))
            return nullptr;
        PyObject *base = memory_of(self)->item(number);
        if (base == nullptr)
            return PyErr_Format(PyExc_IndexError, "there is no block %llu", number);
        if (view == Py_None)
            return alias(base, memory_of(self)->blocks[number].layout);
        Strided layout;
        if (!is_tuple(view) || !PyArg_ParseTuple(view, "OOLO", &sizes, &strides, &offset, &dtype) ||
            !take_strided(sizes, strides, offset, dtype, &layout))
            return nullptr;
        return alias(base, layout);
    });
}

PyObject *get_item(PyObject *self, PyObject *number) {
    const size_t found = PyLong_AsSize_t(number);
    PyObject *base = PyErr_Occurred() ? nullptr : memory_of(self)->item(found);
    return PyErr_Occurred() ? nullptr : Py_NewRef(base == nullptr ? Py_None : base);
}

PyObject *get_held_bytes(PyObject *self, void *) {
    size_t held = 0;
    for (const Block &block : memory_of(self)->blocks)
        held += block.holds ? block.nbytes : 0;
    return PyLong_FromSize_t(held);
}

PyObject *get_nbytes(PyObject *self, void *) {
    size_t all = 0;
    for (const Block &block : memory_of(self)->blocks)
        all += block.nbytes;
    return PyLong_FromSize_t(all);
}

PyObject *get_used(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(memory_of(self)->used); }

PyMethodDef own_memory_methods[] = {
    {"take", take, METH_NOARGS, "The tensors of a call, one for each block, which nothing else uses."},
    {"finish", finish, METH_NOARGS, "Ends a call: memory that is not kept is the program's from now on."},
    {"release", release, METH_NOARGS, "Drops all memory; what the program uses stays alive."},
    {"hold", hold, METH_O, "Whether memory may be kept from call to call."},
    {"alias", make_alias, METH_VARARGS,
     "A new tensor in a block: its number, and sizes, strides, offset, dtype, or None."},
    {"item", get_item, METH_O, "The tensor of a block, by its number; None without memory."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef own_memory_fields[] = {
    {"used", get_used, nullptr, "The number of its latest call, among all calls.", nullptr},
    {"nbytes", get_nbytes, nullptr, "Bytes of all blocks.", nullptr},
    {"held_bytes", get_held_bytes, nullptr, "Bytes that are kept from call to call.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot own_memory_slots[] = {
    {Py_tp_doc, const_cast<char *>("Memory of a function's outputs, which replays write again while it is dead.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_own_memory>)},
    {Py_tp_dealloc, reinterpret_cast<void *>(own_memory_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(own_memory_traverse)},
    {Py_tp_methods, own_memory_methods},
    {Py_tp_getset, own_memory_fields},
    {0, nullptr},
};

} // namespace

void OwnMemory::State::release() {
    if (is_taking)
        return;
    for (Block &block : blocks)
        give_away(&block);
    auto gone = std::exchange(dropped, {});
    gone.clear();
}

PyType_Spec pygraph::own_memory_spec = {
    "pygraph_trees.native._fast_path.OwnMemory", sizeof(OwnMemory), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,     own_memory_slots,
};

OwnMemory::State *pygraph::own_memory_in(PyObject *object) {
    return object != nullptr && Py_TYPE(object)->tp_dealloc == own_memory_dealloc
               ? reinterpret_cast<OwnMemory *>(object)->state
               : nullptr;
}
