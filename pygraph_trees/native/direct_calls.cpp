/* Calls of compiled functions without Dynamo: `enter_directly` of the module.

   The function that torch puts around a compiled one keeps its identity, and its vectorcall is replaced. If all that the
   guards read is as a Memo has it, the memo's code is called. Otherwise the call is torch's, and
   trees/hooks/direct_calls.py may then make another memo. */

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace {

std::array<uint64_t, static_cast<size_t>(Miss::COUNT)> entries; // of functions, by what came of it
constexpr Py_ssize_t MOST_MEMOS = 8;
constexpr uint32_t LONGEST_PAUSE = 1023, STEADY = 64; // calls of torch's between two memos; hits that end a pause

struct {
    PyObject *attribute;                        // of the function, with its Direct
    PyObject *get_callback, *set_complete_hook; // Dynamo's
    PyObject *of_thread, *tracing_context;      // torch._guards._TLS, and the name of its attribute
    PyObject *leave_layers;                     // of functorch
    PyObject *generations;                      // the class that counts calls of compiled functions
} known;

/* The inputs for the compiled code, from the beginning of a call until its code takes them. */
struct Handed {
    static thread_local PyObject *latest;
    PyObject *before;

    explicit Handed(Ref inputs) : before(std::exchange(latest, inputs.release())) {}
    Handed(const Handed &) = delete;
    ~Handed() {
        Ref left(std::exchange(latest, before)); // if its code raised
    }
};

thread_local PyObject *Handed::latest = nullptr;

/* Clears an ordinary exception; throws interrupts and exits. */
void clear_error() {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        throw py::error_already_set();
    PyErr_Clear();
}

/* What a function has in place of torch's vectorcall. Python sets all but the counters. */
struct Direct {
    PyObject *learn = nullptr, *verify = nullptr; // make a memo; compare with Dynamo's guards
    PyObject *bind = nullptr;                     // returns the variables of a call, by name
    PyObject *self = nullptr;                     // the first argument, if the function is a method
    PyObject *target = nullptr;                   // the function that Dynamo compiled
    PyObject *memos = nullptr;                    // a list; the last used is the first
    PyObject *refusal = nullptr;                  // None, or the Counter of calls without a memo for the same reason
    const void *of = nullptr;                     // the function; others may have copied its attributes
    uint32_t every = 0, hits = 0, pause = 0, waits = 0;
    bool is_busy = false;

    void each(const auto &visit) {
        for (PyObject **held : {&learn, &verify, &bind, &self, &target, &memos, &refusal})
            visit(*held);
    }

    void take(const py::dict &given) {
        learn = reference(given["learn"]);
        verify = reference(given["verify"]);
        every = given["every"].cast<uint32_t>();
        memos = PyList_New(0);
    }

    /* Whether torch would not simply look up the function's code: a compiled region, a trace, a mode, the profiler. */
    static bool is_inside() {
        Ref callback(PyObject_CallNoArgs(known.get_callback));
        if (callback.get() != Py_None || c10::impl::TorchDispatchModeTLS::any_modes_set() || at::hasCallbacks() ||
            c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
            return true;
        Ref context(PyObject_GetAttr(known.of_thread, known.tracing_context));
        PyErr_Clear();
        if (context && context.get() != Py_None)
            return true;
        Ref hook(PyObject_CallOneArg(known.set_complete_hook, Py_None));
        if (hook.get() == Py_None)
            return false;
        Ref again(hook ? PyObject_CallOneArg(known.set_complete_hook, hook.get()) : nullptr);
        return true;
    }

    /* The variables of a call as Dynamo's guards see them; NULL if the arguments do not fit. */
    Ref locals_of(const std::vector<PyObject *> &given, size_t count, PyObject *names) const {
        Ref locals(PyObject_Vectorcall(bind, given.data(), count, names));
        clear_error();
        if (!locals || !PyDict_CheckExact(locals.get()) || target == nullptr)
            return Ref();
        const auto *function = reinterpret_cast<PyFunctionObject *>(target);
        if (function->func_closure != nullptr) {
            Ref free(PyObject_GetAttrString(function->func_code, "co_freevars"));
            for (Py_ssize_t i = 0; free && i < PyTuple_GET_SIZE(free.get()); i++)
                if (PyObject *value = PyCell_GET(PyTuple_GET_ITEM(function->func_closure, i)); value != nullptr)
                    PyDict_SetItem(locals.get(), PyTuple_GET_ITEM(free.get(), i), value);
        }
        return locals;
    }

    Miss call(const std::vector<PyObject *> &given, size_t count, PyObject *keywords, Ref *result) {
        if (is_inside())
            return Miss::INSIDE;
        if (PyList_GET_SIZE(memos) == 0 || bind == nullptr)
            return refusal == nullptr || refusal == Py_None ? Miss::FIRST : Miss::REFUSED;
        if (is_busy) // a guard of the clone runs Python, here or in another thread, and the clone has a lock
            return Miss::BUSY;
        Ref locals = locals_of(given, count, keywords);
        if (!locals)
            return Miss::ARGUMENTS;
        Miss why = Miss::INSIDE;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(memos); i++) {
            Ref object = Ref::dup(PyList_GET_ITEM(memos, i));
            const Memo *memo = in<Memo>(object.get());
            if (memo == nullptr || !memo->has_keys())
                continue;
            Ref inputs(PyTuple_New(static_cast<Py_ssize_t>(memo->inputs.size()))); // may collect garbage
            std::vector<Ref> values;
            why = inputs ? memo->compare(locals.get(), PyFunction_GET_GLOBALS(target), &values) : Miss::BUSY;
            // Before any other code runs: it could free tensors, and another thread's first call changes the memo.
            if (why == Miss::TAKEN && !memo->gather(values, inputs.get()))
                why = Miss::BUSY;
            Ref function = Ref::dup(memo->function);
            PyErr_Clear();
            if (why != Miss::TAKEN)
                continue;
            if (is_busy) // another thread has run meanwhile
                return Miss::BUSY;
            is_busy = true;
            const bool is_held = memo->has_guards(locals.get());
            is_busy = false;
            clear_error();
            if (!is_held) {
                why = Miss::GUARD;
                continue;
            }
            if (++hits % STEADY == 0)
                pause = waits = 0;
            if (every != 0 && (hits <= every || hits % every == 0) &&
                !Ref(PyObject_CallFunctionObjArgs(verify, target, memo->guards, locals.get(), nullptr)))
                return Miss::TAKEN; // with an exception
            if (i != 0 && i < PyList_GET_SIZE(memos) && PyList_GET_ITEM(memos, i) == object.get())
                std::swap(PySequence_Fast_ITEMS(memos)[0], PySequence_Fast_ITEMS(memos)[i]);
            locals = Ref();
            values.clear(); // the call's code may be the last to need its arguments
            if (count_call()) {
                const Handed handed(std::move(inputs));
                *result = run(function.get(), given, count, keywords);
            }
            return Miss::TAKEN;
        }
        return why;
    }

    Miss enter(PyObject *const *arguments, Py_ssize_t count, PyObject *names, Ref *result) {
        const size_t first = self != nullptr && self != Py_None;
        const auto total = static_cast<size_t>(count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
        std::vector<PyObject *> given(first + total, self);
        std::copy_n(arguments, total, given.begin() + static_cast<std::ptrdiff_t>(first));
        return call(given, static_cast<size_t>(count) + first, names, result);
    }

    /* Counts a call as torch does: steps of the trees begin with the first call after another. */
    static bool count_call() {
        Ref before(PyObject_GetAttr(known.generations, names.generation)), one(PyLong_FromLong(1));
        Ref next(before && one ? PyNumber_Add(before.get(), one.get()) : nullptr);
        return next && PyObject_SetAttr(known.generations, names.generation, next.get()) == 0;
    }

    /* Calls the code, and leaves dispatch keys and functorch's layers as they were, as torch does. */
    static Ref run(PyObject *function, const std::vector<PyObject *> &given, size_t count, PyObject *names) {
        const c10::impl::ForceDispatchKeyGuard keys;
        Ref result(PyObject_Vectorcall(function, given.data(), count, names));
        if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            Ref left(PyObject_CallFunction(known.leave_layers, "i", 0));
            PyErr_Restore(type, value, trace);
        }
        return result;
    }

    /* After a call of torch's, makes a memo; more and more rarely if none is of use. */
    void learn_from(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
        if (waits > 0) {
            waits--;
            return;
        }
        pause = std::min(2 * pause + 1, LONGEST_PAUSE);
        waits = pause - 1;
        Ref given = tuple_of(static_cast<size_t>(count), [&](size_t i) { return Py_NewRef(arguments[i]); });
        Ref keywords = checked(PyDict_New());
        for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); i++)
            PyDict_SetItem(keywords.get(), PyTuple_GET_ITEM(names, i), arguments[count + i]);
        Ref memo(PyObject_CallFunctionObjArgs(learn, object, given.get(), keywords.get(), nullptr));
        if (memo && in<Memo>(memo.get()) != nullptr && PyList_Insert(memos, 0, memo.get()) == 0 &&
            PyList_GET_SIZE(memos) > MOST_MEMOS)
            PyList_SetSlice(memos, MOST_MEMOS, PyList_GET_SIZE(memos), nullptr);
        clear_error();
    }
};

vectorcallfunc stock = nullptr; // of all functions of Python

/* The attribute of a function, borrowed; perhaps another function's. */
PyObject *attribute_of(const PyFunctionObject *function) {
    return function->func_dict == nullptr ? nullptr : PyDict_GetItemWithError(function->func_dict, known.attribute);
}

Ref direct_of(PyObject *function) {
    PyObject *found = attribute_of(reinterpret_cast<PyFunctionObject *>(function));
    const auto *direct = in<Direct>(found);
    return Ref::dup(direct != nullptr && direct->of == function ? found : nullptr);
}

PyObject *copy_of_direct(PyObject *, PyObject *) {
    return Py_BuildValue("O()", Py_TYPE(Py_None));
}

PyObject *enter(PyObject *function, PyObject *const *arguments, size_t flags, PyObject *names) {
    Ref object = direct_of(function);
    auto *direct = in<Direct>(object.get());
    if (direct == nullptr)
        return stock(function, arguments, flags, names);
    return translated([&]() -> PyObject * {
        const Py_ssize_t count = PyVectorcall_NARGS(flags);
        Ref result;
        const Miss why = direct->enter(arguments, count, names, &result);
        entries[static_cast<size_t>(why)]++;
        if (why == Miss::TAKEN)
            return result.release();
        result = Ref(stock(function, arguments, flags, names));
        if (Counter *counter = declared<Counter>(direct->refusal); counter != nullptr && why == Miss::REFUSED)
            counter->value++;
        if (result && why <= Miss::REFUSED)
            direct->learn_from(object.get(), arguments, count, names);
        return result.release();
    });
}

/* The class of the modules that torch.compile makes, and what decides that a call of one only calls its `forward`. */
struct {
    PyObject *type;
    PyObject *attributes;   // of torch.nn.Module
    PyObject *methods;      // a dictionary of those among them that are part of a call
    PyObject *global_hooks; // a list of dictionaries
    PyObject *own_hooks;    // a list of names of dictionaries
    PyObject *forward, *other_call;
} modules;

/* The function that a call of a module by this method calls, if it does nothing else. */
PyObject *forward_of(PyObject *module, PyObject *method) {
    PyObject **slot = _PyObject_GetDictPtr(module), *own = slot == nullptr ? nullptr : *slot;
    if (reinterpret_cast<PyObject *>(Py_TYPE(module)) != modules.type || own == nullptr || torch::jit::tracer::isTracing())
        return nullptr;
    PyObject *name, *torchs, *of_type = Py_TYPE(module)->tp_dict;
    for (Py_ssize_t i = 0; PyDict_Next(modules.methods, &i, &name, &torchs);)
        if (PyObject *other = value_of(of_type, name);
            value_of(modules.attributes, name) != torchs || (other != nullptr && other != method))
            return nullptr;
    const auto is_empty = [](PyObject *hooks) { return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0; };
    const Items all(modules.global_hooks), hooks(modules.own_hooks);
    if (!std::all_of(all.at, all.at + all.count, is_empty) ||
        !std::all_of(hooks.at, hooks.at + hooks.count, [&](PyObject *key) { return is_empty(value_of(own, key)); }) ||
        value_of(own, modules.other_call) != nullptr)
        return nullptr;
    PyObject *forward = value_of(own, modules.forward); // a function that wraps it may have copied its attributes
    const bool is_entered = forward != nullptr && PyFunction_Check(forward) &&
                            reinterpret_cast<PyFunctionObject *>(forward)->vectorcall == enter;
    return is_entered ? forward : nullptr;
}

/* As `enter`, for the method with which such a module is called. Only a direct call is counted, since torch's enters the
   module's function. */
PyObject *enter_module(PyObject *method, PyObject *const *arguments, size_t flags, PyObject *names) {
    return translated([&]() -> PyObject * {
        const Py_ssize_t count = PyVectorcall_NARGS(flags);
        Ref forward = Ref::dup(count == 0 ? nullptr : forward_of(arguments[0], method));
        Ref object = forward ? direct_of(forward.get()) : Ref();
        auto *direct = in<Direct>(object.get());
        Ref result;
        if (direct == nullptr || direct->enter(arguments + 1, count - 1, names, &result) != Miss::TAKEN)
            return stock(method, arguments, flags, names);
        entries[static_cast<size_t>(Miss::TAKEN)]++;
        return result.release();
    });
}

void know_modules(const py::type &type, const py::type &base, const py::dict &methods, const py::list &global_hooks,
                  const py::list &own_hooks) {
    modules = {reference(type), reinterpret_cast<PyTypeObject *>(reference(base))->tp_dict, reference(methods),
               reference(global_hooks), reference(own_hooks),
               PyUnicode_InternFromString("forward"), PyUnicode_InternFromString("_compiled_call_impl")};
}

/* Replaces a function's vectorcall, or puts Python's back. */
void set_entered(const py::function &given, bool is_entered, bool is_of_modules) {
    if (!PyFunction_Check(given.ptr()))
        throw py::type_error("expected a function of Python");
    auto *function = reinterpret_cast<PyFunctionObject *>(given.ptr());
    if (stock == nullptr)
        stock = function->vectorcall;
    if (auto *direct = in<Direct>(attribute_of(function)))
        direct->of = function;
    const auto own = is_of_modules ? enter_module : enter;
    if (function->vectorcall != (is_entered ? stock : own)) // other code has replaced it
        return;
    const auto wanted = is_entered ? own : stock;
#if PY_VERSION_HEX >= 0x030c0000
    PyFunction_SetVectorcall(function, wanted);
#else
#if PY_VERSION_HEX >= 0x030b0000
    function->func_version = 0; // what the interpreter has specialized for it
#endif
    function->vectorcall = wanted;
#endif
}

PyObject *memo_holds(PyObject *self, PyObject *arguments) {
    PyObject *locals, *globals;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyDict_Type, &locals, &PyDict_Type, &globals))
        return nullptr;
    std::vector<Ref> values;
    return PyBool_FromLong(fields_of<Memo>(self).compare(locals, globals, &values) == Miss::TAKEN);
}

PyObject *memo_gather(PyObject *self, PyObject *arguments) {
    PyObject *given, *function;
    if (!PyArg_ParseTuple(arguments, "O!O", &PyList_Type, &given, &function))
        return nullptr;
    return translated([&]() -> PyObject * {
        Memo &memo = fields_of<Memo>(self);
        std::vector<Input> inputs;
        for (py::handle item : py::reinterpret_borrow<py::list>(given)) {
            const bool is_fixed = is_tensor(item.ptr());
            inputs.push_back(is_fixed ? Input{item.ptr()} : Input{nullptr, item.cast<size_t>()});
            if (is_fixed ? !std::ranges::binary_search(memo.tensors, static_cast<const void *>(item.ptr()))
                         : inputs.back().variable >= memo.variables.size())
                throw py::value_error("expected tensors that facts hold, and variables");
        }
        memo.inputs = std::move(inputs);
        assign(&memo.function, function);
        Py_RETURN_NONE;
    });
}

void add_direct_calls(py::module_ &module) {
    add_class<Memo>(
        module, "Memo", 0, {}, {{"function", T_OBJECT, FIELD(Memo, function), 0, "What is called."}},
        {{"holds", memo_holds, METH_VARARGS, "Whether all is as it was, given local and global variables."},
         {"gather", memo_gather, METH_VARARGS,
          "Sets what `take_inputs` gives, tensors of facts or numbers of variables, and the function that takes it."}});
    add_class<Direct>(
        module, "Direct", 0, {},
        {{"bind", T_OBJECT, FIELD(Direct, bind), 0, "Returns the variables of a call, by name."},
         {"self", T_OBJECT, FIELD(Direct, self), 0, "The first argument of a method; None for other functions."},
         {"target", T_OBJECT, FIELD(Direct, target), 0, "The function that Dynamo compiled."},
         {"refusal", T_OBJECT, FIELD(Direct, refusal), 0, "A Counter of calls, if no memo could be made."},
         {"every", T_UINT, FIELD(Direct, every), READONLY, "Which calls are checked; 0 for none."},
         {"memos", T_OBJECT, FIELD(Direct, memos), READONLY, "The last used one is the first."}},
        {{"__reduce__", copy_of_direct, METH_NOARGS, "A copy is None: it would be another function's."}});
    module.attr("HAS_VERSIONS") = PY_VERSION_HEX < 0x030d0000;
    module.def("know_dynamo",
               [](const std::string &attribute, const py::object &get_callback, const py::object &set_complete_hook,
                  const py::object &of_thread, const py::object &leave_layers, const py::object &generations,
                  const std::string &mark) {
                   known = {PyUnicode_InternFromString(attribute.c_str()), reference(get_callback),
                            reference(set_complete_hook), reference(of_thread),
                            PyUnicode_InternFromString("tracing_context"), reference(leave_layers),
                            reference(generations)};
                   harmless_mark = PyUnicode_InternFromString(mark.c_str());
               },
               "Gives torch's functions that each call needs. Must be called before a function is entered directly.");
    module.def("know_modules", know_modules,
               "Gives the class of torch's compiled modules, torch.nn.Module, those of its methods that a "
               "call runs, dictionaries of hooks of all modules, and names of a module's own.");
    module.def("enter_directly", set_entered, py::arg("function"), py::arg("is_entered"), py::arg("is_of_modules") = false,
               "Whether calls of a function, or of modules by this method, go to the function's Direct first.");
    module.def("take_inputs", [] {
        if (Handed::latest == nullptr)
            throw std::runtime_error("only a direct call has inputs");
        return py::reinterpret_steal<py::object>(std::exchange(Handed::latest, nullptr));
    }, "The inputs of the compiled code in the direct call that has just begun, the last one first.");
    module.def("counted_direct_calls", [] { return entries; }, "Calls without Dynamo, and the others by reason.");
}

} // namespace
