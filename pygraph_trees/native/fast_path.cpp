/* The module pygraph_trees.native._fast_path, and its only unit of compilation. It includes the other C++ files, since
   torch's headers take nearly all of the compiler's time and are then read only once.

   Must only be used with the torch for which it was compiled: see native/location.py. */

// In the order in which they use each other.
#include "objects.h"
#include "own_memory.cpp"
#include "fast_path.h"
#include "addresses.cpp"
#include "own_outputs.cpp"
#include "replay.cpp"
#include "results.cpp"
#include "backward_edges.cpp"
#include "candidates.cpp"
#include "tree.h"
#include "streams.cpp"
#include "tree.cpp"
#include "entry.cpp"
#include "memo.h"
#include "direct_calls.cpp"

#include <ATen/PythonTorchFunctionTLS.h>

namespace {

/* Sets the only item of a list, which tells whether its owner is counted among those that need the collector off. */
void switch_collector(const py::list &is_counted, bool is_off) {
    const bool before = is_counted[0].cast<bool>();
    if (is_off && !before)
        CollectorOff::enter(); // may raise, and then does not count
    is_counted[0] = py::bool_(is_off);
    if (!is_off && before)
        CollectorOff::leave();
}

void exchange_memory(const at::Tensor &one, const at::Tensor &other) {
    c10::StorageImpl *to = one.storage().unsafeGetStorageImpl(), *from = other.storage().unsafeGetStorageImpl();
    if (to->device() != from->device() || to->nbytes() != from->nbytes())
        throw py::value_error("expected storages of the same size on the same device");
    from->set_data_ptr_noswap(to->set_data_ptr(std::move(from->mutable_data_ptr())));
}

void make_resizable(const at::Storage &storage) {
    storage.unsafeGetStorageImpl()->set_allocator(c10::GetAllocator(storage.device_type()));
    storage.unsafeGetStorageImpl()->set_resizable(true);
}

struct {
    uint64_t plain_calls, wrapped_calls, plain_saves, other_saves;
} host_work; // under the GIL

/* A function that returns the arguments of an autograd function as they are if functorch has wrapped none of them, and
   otherwise what ``upstream`` makes of them. */
py::cpp_function unwrapping(const py::object &upstream) {
    return py::cpp_function([upstream](const py::tuple &args) -> py::object {
        for (py::handle arg : args)
            if (THPVariable_Check(arg.ptr()) &&
                THPVariable_Unpack(arg.ptr()).key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
                host_work.wrapped_calls++;
                return upstream(args);
            }
        host_work.plain_calls++;
        return args;
    });
}

/* Detaches the views in two lists of tensors, as AOTAutograd does before a function saves them; those with a true item in
   `are_kept` stay. False, and nothing is changed, if torch's code must do that, since a tensor's class or a mode may have
   methods of its own. */
bool detach_views(py::handle checked, py::handle unchecked, const std::optional<py::list> &are_kept) {
    constexpr Py_ssize_t AHEAD = 8;
    std::vector<std::tuple<PyObject *, Py_ssize_t, size_t>> views; // a list, the place in it, and the place in both
    size_t place = 0;
    for (PyObject *list : {checked.ptr(), unchecked.ptr()}) {
        if (!PyList_CheckExact(list) || at::impl::torch_function_mode_enabled())
            return false;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++, place++) {
            PyObject *item = PyList_GET_ITEM(list, i);
            PyObject *next = i + AHEAD < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, i + AHEAD) : Py_None;
            if (is_tensor(next))
                Known::ahead(THPVariable_Unpack(next).unsafeGetTensorImpl(), 31); // what is_view reads
            if (!THPVariable_CheckExact(item))
                return false;
            if (THPVariable_Unpack(item).is_view())
                views.emplace_back(list, i, place);
        }
    }
    if (are_kept && are_kept->size() != place)
        return false;
    for (const auto &[list, i, of_both] : views)
        if (!are_kept || !(*are_kept)[of_both].cast<bool>())
            py::reinterpret_borrow<py::list>(list)[i] = py::handle(PyList_GET_ITEM(list, i)).attr("detach")();
    return true;
}

thread_local PyObject *noted_codes = nullptr; // a dictionary, while this thread notes which code its calls run

int note_code(PyObject *, PyFrameObject *frame, int what, PyObject *) {
    if (what != PyTrace_CALL || noted_codes == nullptr)
        return 0;
    Ref code(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame))), key(PyLong_FromVoidPtr(code.get()));
    return key ? PyDict_SetItem(noted_codes, key.get(), code.get()) : -1;
}

/* Notes code while it exists, unless there is another profiler. In C++, since an interrupt may come between any two steps
   of Python code. A profile function in Python would not do: Dynamo does not see what a finalizer calls inside of it. */
class NotingCodes {
  public:
    const bool is_on = PyThreadState_Get()->c_profilefunc == nullptr;

    explicit NotingCodes(PyObject *codes) {
        if (is_on)
            noted_codes = codes, profile(note_code);
    }
    ~NotingCodes() {
        if (!is_on)
            return;
        noted_codes = nullptr;
        if (PyThreadState_Get()->c_profilefunc == note_code) // else the program has set another one
            profile(nullptr);
    }
    NotingCodes(const NotingCodes &) = delete;
    NotingCodes &operator=(const NotingCodes &) = delete;

  private:
    static void profile(Py_tracefunc function) {
        const bool was_on = PyGC_Disable() != 0; // Dynamo does not see what a finalizer calls in Python's audit hooks
        PyEval_SetProfile(function, nullptr);
        if (was_on)
            PyGC_Enable();
    }
};

/* A function's result, and whether the code of each Python function that it called was put into the dictionary. */
std::pair<py::object, bool> call_noting_codes(const py::dict &codes, const py::object &function, const py::tuple &args,
                                              const py::dict &keywords) {
    const NotingCodes noting(codes.ptr());
    Ref result = checked(PyObject_Call(function.ptr(), args.ptr(), keywords.ptr())); // errors are C++'s from here on
    return {py::reinterpret_steal<py::object>(result.release()), noting.is_on};
}

/* Interns the names, and returns those of torch, with their owners. */
std::vector<std::string> intern_names() {
    std::vector<std::string> found;
#define ADD(owner, name)                                                                                               \
    names.name = PyUnicode_InternFromString(#name);                                                                    \
    found.push_back(#owner "." #name);
    TORCH_NAMES(ADD)
#undef ADD
    names.fast_call = PyUnicode_InternFromString("fast_call");
    names.native = PyUnicode_InternFromString("native");
    return found;
}

} // namespace

PYBIND11_MODULE(_fast_path, module) {
    py::register_local_exception_translator([](std::exception_ptr raised) {
        translated([&]() -> PyObject * { std::rethrow_exception(raised); });
    });
    module.doc() = "The fast path.";
    module.attr("NAMES") = intern_names();
    declare_addresses(module);
    declare_own_memory(module);
    add_replay(module);
    add_tree(module);
    add_entry(module);
    add_backward_edges(module);
    add_direct_calls(module);
    module.def("collector_off", [](const py::list &is_counted) { switch_collector(is_counted, true); },
               "Turns the collector off, and sets the list's only item.");
    module.def("collector_on", [](const py::list &is_counted) { switch_collector(is_counted, false); },
               "Turns it on again, unless it is off for others, if the item was set.");
    module.def("collector_forked", CollectorOff::forked, "Turns it on after a fork, if it was off for any.");
    module.def("counts", [] { return std::tuple(counted.asked, counted.fast, counted.in_python); },
               "How many calls asked for a fast replay, got one, and got one that Python made.");
    module.def("exchange_memory", exchange_memory, "Exchanges the memory of the storages of two tensors.");
    module.def("make_resizable", make_resizable, "Lets a storage that does not own its memory get other memory.");
    module.def("call_noting_codes", call_noting_codes,
               "Calls a function with a tuple and a dictionary of arguments, and puts the code of each Python function "
               "that it calls into a dictionary, by identity. Returns the result, and False if there is another profiler.");
    module.def("note_stream", note_stream, "Notes that another stream uses a tensor's memory.");
    module.def("counted_host_work",
               [] {
                   return std::tuple(host_work.plain_calls, host_work.wrapped_calls, host_work.plain_saves,
                                     host_work.other_saves);
               },
               "Calls without and with a wrapper, and forwards whose tensors were and were not saved at once.");
    module.def("unwrapping", unwrapping, "A faster torch._functorch.utils.unwrap_dead_wrappers, given torch's.");
    module.def("detach_views",
               [](py::handle checked, py::handle unchecked, const std::optional<py::list> &are_kept) {
                   const bool done = detach_views(checked, unchecked, are_kept);
                   (done ? host_work.plain_saves : host_work.other_saves)++;
                   return done;
               },
               "Detaches the views among tensors that a forward saves, if they are plain.");
    module.def("thread_of_trees", thread_of_trees, "The number of the thread whose trees a call uses.");
}
