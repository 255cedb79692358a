/* What Dynamo's guards read, as it was when they held: the types of `direct_calls.cpp`.

   Pointers are borrowed from the program. Steps are compared in an order in which each object that is read is held by one
   that was compared before it, and versions of dictionaries are never used twice. */

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

/* Why a call is torch's, in the order in which trees/hooks/direct_calls.py reports it. The first ones lead to a memo. */
enum class Miss { TAKEN, FIRST, CHANGED, ARGUMENTS, GUARD, REFUSED, INSIDE, BUSY, COUNT };

constexpr size_t STEPS_AHEAD = 10;

/* Changes with each change of a dictionary; no other dictionary has had it. */
inline uint64_t version_of(PyObject *dict) {
#if PY_VERSION_HEX < 0x030c0000
    return reinterpret_cast<PyDictObject *>(dict)->ma_version_tag;
#elif PY_VERSION_HEX < 0x030d0000
    C10_DIAGNOSTIC_PUSH_AND_IGNORED_IF_DEFINED("-Wdeprecated-declarations")
    return reinterpret_cast<PyDictObject *>(dict)->ma_version_tag >> 8; // the other bits belong to watchers
    C10_DIAGNOSTIC_POP()
#else
    return 0; // the module's `HAS_VERSIONS` is false
#endif
}

/* Changes with each change of a class or its bases; 0 if it cannot be known. */
inline uint64_t version_of_class(PyTypeObject *type) {
#if PY_VERSION_HEX < 0x030d0000
    return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
#else
    return 0;
#endif
}

/* What guards read of a tensor, besides its attributes. */
struct Metadata {
    PyTypeObject *type = nullptr;
    uint64_t keys = 0;
    at::ScalarType dtype{};
    c10::Device device{c10::kCPU};
    bool requires_grad = false;
    bool has_offset = true;               // whether the offset counts
    c10::SmallVector<int64_t, 9> numbers; // sizes, strides, offset

    friend bool operator==(const Metadata &, const Metadata &) = default;

    static Metadata of(PyObject *object) {
        const at::Tensor &tensor = THPVariable_Unpack(object);
        Metadata found{Py_TYPE(object),  tensor.key_set().raw_repr(), tensor.scalar_type(),
                       tensor.device(), tensor.requires_grad()};
        found.numbers.append(tensor.sizes().begin(), tensor.sizes().end());
        found.numbers.append(tensor.strides().begin(), tensor.strides().end());
        found.numbers.push_back(tensor.storage_offset());
        return found;
    }

    bool fits(PyObject *object) const {
        const c10::TensorImpl *tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
        if (Py_TYPE(object) != type || tensor == nullptr || tensor->key_set().raw_repr() != keys ||
            c10::typeMetaToScalarType(tensor->dtype()) != dtype || tensor->device() != device ||
            tensor->requires_grad() != requires_grad)
            return false;
        const auto sizes = tensor->sizes(), strides = tensor->strides();
        return 2 * sizes.size() + 1 == numbers.size() && std::equal(sizes.begin(), sizes.end(), numbers.begin()) &&
               std::equal(strides.begin(), strides.end(), numbers.begin() + static_cast<int64_t>(sizes.size())) &&
               (!has_offset || tensor->storage_offset() == numbers.back());
    }
};

/* One fact about an object. Pointers are borrowed from the program. A call reads a thousand, so it is small. */
struct Step {
    enum Kind { OBJECT, DICT, TENSOR, EMPTY, CLASS, FUNCTION, CELL, ITEM, ENTRY } kind;
    PyObject *object;
    PyObject **slot = nullptr;           // of its dictionary
    std::array<const void *, 2> other{}; // what is there, or what it has
    mutable uint64_t version = 0;        // of an item: that of the dictionary in which it was last seen
    const c10::TensorImpl *tensor = nullptr; // only to load it ahead
    std::shared_ptr<const Metadata> metadata; // of a tensor; many have the same
    std::unique_ptr<const std::array<const void *, 5>> parts; // of a function

    static std::array<const void *, 5> of_function(PyObject *object) {
        const auto *function = reinterpret_cast<PyFunctionObject *>(object);
        return {function->func_code, function->func_defaults, function->func_kwdefaults, function->func_closure,
                function->func_name};
    }

    static const void *name_of_class(PyObject *object) {
        const bool is_heap_type = PyType_HasFeature(reinterpret_cast<PyTypeObject *>(object), Py_TPFLAGS_HEAPTYPE);
        return is_heap_type ? reinterpret_cast<PyHeapTypeObject *>(object)->ht_name : nullptr;
    }

    bool has_attributes() const {
        return slot == nullptr || (*slot == other[0] && (*slot == nullptr || version_of(*slot) == version));
    }

    bool has_entry() const {
        return PyDict_GetItemWithError(object, static_cast<PyObject *>(const_cast<void *>(other[0]))) == other[1];
    }

    /* Loads what `holds` reads. */
    void ahead() const {
        Known::ahead(object, 0);
        if (slot != nullptr)
            Known::ahead(slot, 0), Known::ahead(other[0], 0);
        for (size_t offset = 0; tensor != nullptr && offset < sizeof(c10::TensorImpl); offset += 64)
            Known::ahead(tensor, offset);
    }

    bool holds() const {
        switch (kind) {
        case OBJECT:
            return Py_TYPE(object) == other[1] && (slot == nullptr || *slot == other[0]);
        case DICT:
            return version_of(object) == version;
        case TENSOR:
            return Py_TYPE(object) == other[1] && has_attributes() && metadata->fits(object);
        case EMPTY:
            return PyDict_GET_SIZE(object) == 0;
        case CLASS:
            return version_of_class(reinterpret_cast<PyTypeObject *>(object)) == version && name_of_class(object) == other[0];
        case FUNCTION:
            return of_function(object) == *parts;
        case CELL:
            return PyCell_GET(object) == other[0];
        case ITEM:
            if (const uint64_t now = version_of(object); now == 0 || now != version) {
                if (!has_entry())
                    return false;
                version = now;
            }
            return true;
        case ENTRY:
            return has_entry();
        }
        return false;
    }
};

inline Step step_of(const std::string &kind, PyObject *object, PyObject *one, PyObject *two) {
    Step step{kind == "entry" ? Step::ENTRY : Step::ITEM, object};
    step.other = {one, two};
    if (kind == "dict" || kind == "empty") {
        step.kind = kind == "dict" ? Step::DICT : Step::EMPTY;
        step.version = version_of(object);
        if (!PyDict_Check(object) || (kind == "dict" && (!PyDict_CheckExact(object) || step.version == 0)))
            throw py::type_error("expected a dictionary");
    } else if (const bool is_tensor_step = kind == "tensor"; kind == "object" || is_tensor_step) {
        step.kind = is_tensor_step ? Step::TENSOR : Step::OBJECT;
        step.other = {nullptr, Py_TYPE(object)};
        step.slot = one == Py_None && !is_tensor_step ? nullptr : _PyObject_GetDictPtr(object);
        if (step.slot == nullptr ? one != Py_None : *step.slot != one && !is_tensor_step)
            throw py::value_error("an object has another dictionary");
        if (step.slot != nullptr && *step.slot != nullptr)
            step.other[0] = *step.slot, step.version = version_of(*step.slot);
        if (is_tensor_step)
            step.metadata = std::make_shared<Metadata>(Metadata::of(object)),
            step.tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    } else if (kind == "class") {
        step.kind = Step::CLASS;
        _PyType_Lookup(reinterpret_cast<PyTypeObject *>(object), names.generation); // gives it a version
        step.version = version_of_class(reinterpret_cast<PyTypeObject *>(object));
        step.other = {step.name_of_class(object)};
        if (step.version == 0)
            throw py::value_error("a class has no version");
    } else if (kind == "function") {
        step.kind = Step::FUNCTION;
        step.parts = std::make_unique<std::array<const void *, 5>>(Step::of_function(object));
    } else if (kind == "cell") {
        step.kind = Step::CELL;
        step.other = {one};
    }
    return step;
}

/* A local or global variable, or an item of one, that is a tensor like another one, or a certain object. */
struct Variable {
    bool is_global = false;
    PyObject *name = nullptr, *item = nullptr; // owned by the memo's `kept`
    const void *object = nullptr;              // NULL for a tensor
    Metadata metadata{};

    PyObject *in(PyObject *locals, PyObject *globals) const {
        PyObject *found = PyDict_GetItemWithError(is_global ? globals : locals, name);
        if (found == nullptr || item == Py_None)
            return found;
        if (PyDict_CheckExact(found))
            return PyDict_GetItemWithError(found, item);
        if ((!PyTuple_CheckExact(found) && !PyList_CheckExact(found)) || !PyLong_CheckExact(item))
            return nullptr;
        const Py_ssize_t index = PyLong_AsSsize_t(item);
        return index >= 0 && index < PySequence_Fast_GET_SIZE(found) ? PySequence_Fast_GET_ITEM(found, index) : nullptr;
    }
};

inline PyObject *harmless_mark = nullptr; // an attribute that compiled code sets, and that no guard reads

inline bool is_marked(PyObject *object) {
    PyObject **slot = _PyObject_GetDictPtr(object);
    const Py_ssize_t count = slot == nullptr || *slot == nullptr ? 0 : PyDict_GET_SIZE(*slot);
    return count > 1 || (count == 1 && PyDict_GetItemWithError(*slot, harmless_mark) == nullptr);
}

/* An input of the compiled code: a tensor that a step holds, or a variable. */
struct Input {
    PyObject *tensor = nullptr; // borrowed
    size_t variable = 0;
};

struct Memo {
    PyObject *function = nullptr; // with the code that Dynamo made
    PyObject *check = nullptr;    // runs the other guards; None if `leaves` has them
    PyObject *guards = nullptr;   // all, as Dynamo has them
    PyObject *kept = nullptr;     // names, values of settings and classes, to which others point
    std::vector<Step> steps;
    std::vector<Variable> variables;
    std::vector<std::pair<PyObject *, PyObject *>> leaves; // guards, with the variable's name or None for all; in `kept`
    std::vector<const void *> tensors;                     // of steps, in order
    std::vector<Input> inputs;         // of the compiled code, the last one first; none if `function` gathers them
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();

    void each(const auto &visit) {
        for (PyObject **held : {&function, &check, &guards, &kept})
            visit(*held);
    }

    void take(const py::dict &given) {
        function = reference(given["function"]);
        check = reference(given["check"]);
        guards = reference(given["guards"]);
        kept = reference(given["kept"]);
        for (py::handle item : given["steps"]) {
            const auto [kind, object, one, two] = item.cast<std::tuple<std::string, py::object, py::object, py::object>>();
            Step &step = steps.emplace_back(step_of(kind, object.ptr(), one.ptr(), two.ptr()));
            if (step.kind != Step::TENSOR)
                continue;
            tensors.push_back(object.ptr());
            if (const auto same = std::ranges::find_if(
                    steps, [&](const Step &other) { return other.metadata && *other.metadata == *step.metadata; });
                same != steps.end())
                step.metadata = same->metadata;
        }
        std::ranges::sort(tensors);
        for (py::handle item : given.contains("leaves") ? py::list(given["leaves"]) : py::list()) {
            const auto [guard, name] = item.cast<std::pair<py::object, py::object>>();
            leaves.emplace_back(guard.ptr(), name.ptr());
        }
        for (py::handle item : given["variables"]) {
            const auto [is_global, name, key, object, has_offset] =
                item.cast<std::tuple<bool, py::object, py::object, py::object, bool>>();
            Variable variable{is_global, name.ptr(), key.ptr(), object.ptr()};
            if (is_tensor(object.ptr())) {
                variable.object = nullptr;
                variable.metadata = Metadata::of(object.ptr());
                variable.metadata.has_offset = has_offset;
            }
            variables.push_back(std::move(variable));
        }
    }

    bool has_keys() const {
        const auto now = c10::impl::tls_local_dispatch_key_set();
        return now.included_ == keys.included_ && now.excluded_ == keys.excluded_;
    }

    /* Whether the guards that are no facts hold. They may run Python. */
    bool has_guards(PyObject *locals) const {
        const auto holds = [](PyObject *guard, PyObject *value) {
            return value != nullptr && Ref(PyObject_CallOneArg(guard, value)).get() == Py_True;
        };
        if (check != Py_None)
            return holds(check, locals);
        return !at::SavedTensorDefaultHooks::get_hooks(true) && std::ranges::all_of(leaves, [&](const auto &leaf) {
            return holds(leaf.first, leaf.second == Py_None ? locals : PyDict_GetItemWithError(locals, leaf.second));
        });
    }

    /* Puts the inputs of a call whose facts have just been found to hold, with these variables, into an empty tuple. Its
       size tells whether they are still as they were when it was made. */
    bool gather(const std::vector<Ref> &values, PyObject *room) const {
        if (static_cast<size_t>(PyTuple_GET_SIZE(room)) != inputs.size())
            return false;
        for (size_t i = 0; i < inputs.size(); i++)
            PyTuple_SET_ITEM(room, static_cast<Py_ssize_t>(i),
                             Py_NewRef(inputs[i].tensor == nullptr ? values[inputs[i].variable].get() : inputs[i].tensor));
        return true;
    }

    /* Whether facts hold; the guards in `check` are not run. `values` gets the objects of the variables. */
    Miss compare(PyObject *locals, PyObject *globals, std::vector<Ref> *values) const {
        std::vector<const void *> seen;
        for (const Variable &variable : variables) {
            PyObject *found = variable.in(locals, globals);
            if (found == nullptr)
                return Miss::ARGUMENTS;
            values->push_back(Ref::dup(found));
            if (variable.object != nullptr) {
                if (found != variable.object)
                    return Miss::CHANGED;
                continue;
            }
            // Guards look for attributes that mark dimensions, and for tensors that are given twice.
            if (!is_tensor(found) || !variable.metadata.fits(found) || is_marked(found) ||
                std::ranges::find(seen, found) != seen.end() || std::ranges::binary_search(tensors, found))
                return Miss::ARGUMENTS;
            seen.push_back(found);
        }
        for (size_t i = 0; i < steps.size(); i++) {
            if (i + STEPS_AHEAD < steps.size())
                steps[i + STEPS_AHEAD].ahead();
            if (!steps[i].holds())
                return Miss::CHANGED;
        }
        return Miss::TAKEN;
    }
};

} // namespace
