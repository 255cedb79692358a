/* Python objects in C++: references, calls, classes and tensors; whether a tensor is dead.

   Errors are C++ exceptions, Python's included, until `translated` turns them into Python's at the boundary. */

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <structmember.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <vector>

namespace {

using Ref = THPObjectPtr; // an owned reference

/* Calls a function and turns C++ exceptions into Python's. */
template <typename Function> PyObject *translated(const Function &function) {
    try {
        return function();
    } catch (py::error_already_set &error) {
        error.restore();
    } catch (const py::cast_error &error) {
        PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const py::builtin_exception &error) {
        error.set_error();
    } catch (const std::exception &) {
        torch::translate_exception_to_python(std::current_exception());
    }
    return nullptr;
}

/* What a function of Python's API has returned; throws its exception. */
inline Ref checked(PyObject *made) {
    if (made == nullptr)
        throw py::error_already_set();
    return Ref(made);
}

inline bool checked(int answer) {
    if (answer < 0)
        throw py::error_already_set();
    return answer != 0;
}

inline bool is_true(const Ref &object) { return checked(PyObject_IsTrue(const_cast<PyObject *>(object.get()))); }

/* Calls a Python object. */
template <typename... Arguments> Ref called(PyObject *callable, Arguments... arguments) {
    PyObject *given[] = {nullptr, arguments...};
    constexpr size_t count = sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    return checked(PyObject_Vectorcall(callable, given + 1, count, nullptr));
}

/* A value of a dictionary, borrowed; NULL without. */
inline PyObject *value_of(PyObject *dictionary, PyObject *key) {
    PyObject *value = PyDict_GetItemWithError(dictionary, key);
    if (value == nullptr && PyErr_Occurred())
        throw py::error_already_set();
    return value;
}

/* A tuple of the items that a function returns, each a new reference. */
template <typename Function> Ref tuple_of(size_t count, const Function &item) {
    Ref made = checked(PyTuple_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), item(i));
    return made;
}

/* The Python class of a struct, set when the module is loaded and never freed. */
template <typename T> inline PyTypeObject *class_of = nullptr;

/* An object of a class whose fields each replay reads. T has a template `each`, which calls a function with each
   reference that the fields own, and may have `take`, which sets the fields from the arguments, by name. */
template <typename T> struct Object {
    PyObject_HEAD
    bool is_alive; // until the collector clears it
    T fields;

    static PyObject *make(PyTypeObject *type, PyObject *, PyObject *keywords) {
        return translated([&]() -> PyObject * {
            Ref made(type->tp_alloc(type, 0));
            if (!made)
                return nullptr;
            auto *object = reinterpret_cast<Object *>(made.get());
            new (&object->fields) T();
            object->is_alive = true;
            if constexpr (requires(T fields, py::dict given) { fields.take(given); })
                object->fields.take(keywords == nullptr ? py::dict() : py::reinterpret_borrow<py::dict>(keywords));
            return made.release();
        });
    }

    static int traverse(PyObject *self, visitproc visit, void *arg) {
        int result = visit(reinterpret_cast<PyObject *>(Py_TYPE(self)), arg);
        reinterpret_cast<Object *>(self)->fields.each([&](PyObject *&held) {
            if (result == 0 && held != nullptr)
                result = visit(held, arg);
        });
        return result;
    }

    static int clear(PyObject *self) {
        auto *object = reinterpret_cast<Object *>(self);
        object->is_alive = false;
        object->fields.each([](PyObject *&held) { Py_CLEAR(held); });
        return 0;
    }

    static void dealloc(PyObject *self) {
        PyTypeObject *type = Py_TYPE(self);
        PyObject_GC_UnTrack(self);
        clear(self);
        reinterpret_cast<Object *>(self)->fields.~T();
        type->tp_free(self);
        Py_DECREF(type);
    }
};

/* Adds the class of such objects to a module. */
template <typename T>
void add_class(py::module_ &module, const char *name, unsigned long flags, std::vector<PyType_Slot> slots,
               std::vector<PyMemberDef> with_members = {}, std::vector<PyMethodDef> with_methods = {}) {
    // Python points to these, also while the process ends.
    static const auto &full = *new std::string(std::string("pygraph_trees.native._fast_path.") + name);
    static auto &members = *new std::vector(std::move(with_members));
    static auto &methods = *new std::vector(std::move(with_methods));
    members.emplace_back(), methods.emplace_back();
    slots.insert(slots.end(), {{Py_tp_members, members.data()},
                               {Py_tp_methods, methods.data()},
                               {Py_tp_new, reinterpret_cast<void *>(Object<T>::make)},
                               {Py_tp_traverse, reinterpret_cast<void *>(Object<T>::traverse)},
                               {Py_tp_clear, reinterpret_cast<void *>(Object<T>::clear)},
                               {Py_tp_dealloc, reinterpret_cast<void *>(Object<T>::dealloc)},
                               {0, nullptr}});
    flags |= Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    PyType_Spec spec{full.c_str(), sizeof(Object<T>), 0, static_cast<unsigned>(flags), slots.data()};
    class_of<T> = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&spec));
    if (class_of<T> == nullptr || PyModule_AddType(module.ptr(), class_of<T>) < 0)
        throw py::error_already_set();
}

/* Where a field of such an object is, for a table of members. */
#define FIELD(owner, name) (offsetof(Object<owner>, fields) + offsetof(owner, name))

/* The fields of an object of this class. */
template <typename T> T &fields_of(PyObject *object) { return reinterpret_cast<Object<T> *>(object)->fields; }

/* The fields of an object; NULL for NULL, for one of another class, and for one that the collector has cleared. */
template <typename T> T *in(PyObject *object) {
    const bool is_one = object != nullptr && PyObject_TypeCheck(object, class_of<T>);
    return is_one && reinterpret_cast<Object<T> *>(object)->is_alive ? &fields_of<T>(object) : nullptr;
}

/* The C++ object in one of a class that pybind11 declares; NULL for NULL, and for one of another class. */
template <typename T> T *declared(PyObject *object) {
    return object != nullptr && Py_IS_TYPE(object, class_of<T>)
               ? reinterpret_cast<py::detail::instance *>(object)->get_value_and_holder().value_ptr<T>()
               : nullptr;
}

/* Declares a class with pybind11. */
template <typename T> auto declare(py::module_ &module, const char *name) {
    py::class_<T, std::shared_ptr<T>> made(module, name);
    class_of<T> = reinterpret_cast<PyTypeObject *>(made.inc_ref().ptr());
    return made;
}

/* Keeps Python's garbage collector off while it exists. It is off as long as any replay, or any `paused` of
   trees/pools/collector.py, needs that, in whatever thread. The GIL protects the count. */
class CollectorOff {
  public:
    CollectorOff() { enter(); }
    ~CollectorOff() { leave(); }
    CollectorOff(const CollectorOff &) = delete;
    CollectorOff &operator=(const CollectorOff &) = delete;

    static void enter() {
        // Threads that launch, or wait for the GIL afterwards, in turn would keep it off for good.
        if (inside != 0 && here == 0 && (missed += inside == launching ? IN_LAUNCHES : 1) >= MOST_MISSED)
            catch_up();
        here++;
        if (inside++ == 0) {
            was_on = PyGC_Disable() != 0;
            missed = 0;
        }
    }

    static void leave() {
        here -= here != 0;
        if (inside != 0 && --inside == 0 && was_on) // 0 if this process was forked inside
            PyGC_Enable();
    }

    /* In a new process: the threads that were inside do not exist there. */
    static void forked() {
        if (inside != 0 && was_on)
            PyGC_Enable();
        inside = launching = 0;
    }

    /* While it exists, other threads run, and may do anything. */
    struct Launching {
        Launching() { launching++; }
        ~Launching() { launching -= launching != 0; }
        Launching(const Launching &) = delete;
        Launching &operator=(const Launching &) = delete;
    };

  private:
    static constexpr int MOST_MISSED = 1024, IN_LAUNCHES = 64;

    /* Lets it run if it is due, although other threads keep it off: they run any code of this one as well. Throws what a
       handler of a signal raises. */
    static void catch_up() {
        missed = 0;
        if (!was_on)
            return;
        PyGC_Enable();
        const Ref due(PyTuple_New(64)); // Python looks when it allocates; smaller ones it may have kept
#if PY_VERSION_HEX >= 0x030C0000
        const bool is_raised = PyErr_CheckSignals() != 0; // runs what is scheduled
#else
        const bool is_raised = false;
#endif
        if (inside != 0) // the other threads may have left meanwhile
            PyGC_Disable();
        if (is_raised || !due)
            throw py::error_already_set();
    }

    static inline int inside = 0, launching = 0; // in `inside`, too
    static inline int missed = 0;                // how often calls found it off since it was on, weighted
    static inline thread_local int here = 0;     // of `inside`, this thread's
    static inline bool was_on = false;
};

/* Runs a scheduled collection. Otherwise, Python 3.12 runs it at the next call of a Python function, even if the collector
   has been turned off by then. */
inline void collect_if_scheduled() {
#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
    checked(PyErr_CheckSignals());
#endif
}

/* A number that Python reads and writes as `value`. */
struct Counter {
    unsigned long long value = 0;

    /* An argument; None is none. */
    static std::shared_ptr<Counter> of(const py::object &given) {
        if (given.is_none())
            throw py::type_error("expected a Counter");
        return given.cast<std::shared_ptr<Counter>>();
    }
};

/* A new reference to an argument. */
inline PyObject *reference(const py::object &given) { return Py_NewRef(given.ptr()); }

/* Replaces a reference that an object owns. */
inline void assign(PyObject **place, PyObject *value) {
    if (*place != value)
        Ref before(std::exchange(*place, Py_NewRef(value)));
}

/* The items of a list or a tuple. */
struct Items {
    PyObject **at = nullptr;
    Py_ssize_t count = 0;

    Items() = default;
    explicit Items(const std::vector<PyObject *> &items)
        : at(const_cast<PyObject **>(items.data())), count(static_cast<Py_ssize_t>(items.size())) {}
    explicit Items(PyObject *sequence) {
        if (!PyList_Check(sequence) && !PyTuple_Check(sequence))
            throw py::type_error(std::string("expected a list or a tuple, got ") + Py_TYPE(sequence)->tp_name);
        at = PySequence_Fast_ITEMS(sequence);
        count = PySequence_Fast_GET_SIZE(sequence);
    }
};

/* An item of a list, borrowed; NULL if the list is shorter. */
inline PyObject *item_of(PyObject *list, uint64_t index) {
    return index < static_cast<uint64_t>(PyList_GET_SIZE(list)) ? PyList_GET_ITEM(list, static_cast<Py_ssize_t>(index))
                                                                : nullptr;
}

/* Whether there is an object and it is a tensor. */
inline bool is_tensor(PyObject *object) {
    if (object == nullptr)
        return false;
    PyTypeObject *type = Py_TYPE(object), *tensor = reinterpret_cast<PyTypeObject *>(THPVariableClass);
    return type == tensor || PyType_IsSubtype(type, tensor);
}

inline uint64_t address_of(const at::Tensor &tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()); }

inline Ref wrapped(at::Tensor tensor) { return checked(THPVariable_Wrap(std::move(tensor))); }

/* Whether a tensor reads otherwise than its memory: as a negated or conjugate view. Nothing guards tangents against it. */
inline bool is_lazy(const at::Tensor &tensor) { return tensor.is_neg() || tensor.is_conj(); }

/* Where a tensor's object, implementation and storage were at the last call, and the storage's Python object. */
struct Known {
    const void *object = nullptr, *tensor = nullptr, *storage = nullptr, *own = nullptr;

    /* Loads the fields that find reads: the first and last byte of each, whatever the boundaries of cache lines. It is
       always inlined, since the compiler takes a function that only prefetches for one that does nothing. */
    __attribute__((always_inline)) void load() const {
        ahead(object, 0), ahead(object, 31);
        ahead(tensor, 8), ahead(tensor, 31);
        ahead(storage, 8);
        ahead(tensor, sizeof(c10::TensorImpl) - 32), ahead(tensor, sizeof(c10::TensorImpl) - 1);
        ahead(storage, 31), ahead(storage, 60);
    }

    /* Loads the fields that is_dead reads. The last one of each Python object is the list of its weak references. */
    __attribute__((always_inline)) void load_references() const {
        ahead(object, 0), ahead(object, 47);
        ahead(tensor, 8), ahead(tensor, 31);
        ahead(storage, 8);
        load_own();
    }

    /* Loads what tells whether only its storage is held. */
    __attribute__((always_inline)) void load_own() const { ahead(storage, 71), ahead(own, 0), ahead(own, 31); }

    void note(PyObject *found) {
        const c10::TensorImpl *impl = THPVariable_Unpack(found).unsafeGetTensorImpl();
        c10::StorageImpl *held = impl->unsafe_storage().unsafeGetStorageImpl();
        if (object != found || tensor != impl || storage != held)
            *this = Known{found, impl, held, held == nullptr ? nullptr : held->pyobj_slot()->load_pyobj()};
    }

    __attribute__((always_inline)) static void ahead(const void *begin, size_t offset) {
        __builtin_prefetch(static_cast<const char *>(begin) + offset);
    }
};

/* Whether the program has weak references to a tensor or a storage, through which it would get the object again. */
inline bool has_weak_references(PyObject *object) {
    return Py_TYPE(object)->tp_weaklistoffset != 0 && *PyObject_GET_WEAKREFS_LISTPTR(object) != nullptr;
}

/* Whether a tensor has only the given number of references in Python and none in C++, no autograd graph, and a storage
   that only the tensor and its Python object reference, which nothing else references. Weak references count, too. */
inline bool is_dead(PyObject *object, Py_ssize_t references = 1) {
    if (Py_REFCNT(object) != references || has_weak_references(object))
        return false;
    const at::Tensor &tensor = THPVariable_Unpack(object);
    if (tensor.use_count() != 1)
        return false;
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (impl->autograd_meta() != nullptr && tensor.grad_fn() != nullptr)
        return false;
    const c10::Storage &storage = impl->unsafe_storage(); // torch's other accessors are virtual functions
    if (!storage || storage.use_count() != 2)
        return false;
    PyObject *own = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
    return own != nullptr && Py_REFCNT(own) == 1 && !has_weak_references(own);
}

} // namespace
