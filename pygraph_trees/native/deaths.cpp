/* Whether outputs of recordings are dead.

   C++ sees most dead outputs itself; Python recognizes more. Outputs that are inputs of the call too die when the call
   releases them: that is seen before the launch, without releasing them. */

#include "fast_path.h"

#include <unordered_map>

using namespace pygraph;

namespace {

constexpr size_t NOWHERE = ~size_t{0};

/* NULL if the list has become shorter. */
PyObject *item_of(PyObject *list, uint64_t index) {
    return index < static_cast<uint64_t>(PyList_GET_SIZE(list)) ? PyList_GET_ITEM(list, static_cast<Py_ssize_t>(index))
                                                                : nullptr;
}

/* Whether an output seems dead. If the program gave it other memory, somebody may hold the storage that it had. */
bool seems_dead(PyObject *list, uint64_t index, uint64_t address) {
    PyObject *object = item_of(list, index);
    return object != nullptr && object != Py_None && is_dead(object) &&
           reinterpret_cast<uintptr_t>(THPVariable_Unpack(object).unsafeGetTensorImpl()->unsafe_storage().data()) ==
               address;
}

} // namespace

bool Mortal::died_as(const std::vector<Watched> &inputs) const {
    if (places.empty())
        return false;
    const Dying *place = places.data();
    for (const Run &run : runs)
        for (const Dying *end = place + run.outputs.size(); place < end; place++) {
            if (place->input == NOWHERE)
                continue;
            const Watched &input = inputs[place->input];
            if (!input.dies_here || input.known.object != item_of(run.list, place->index))
                return false;
        }
    return true;
}

bool Mortal::others_seem_dead() const {
    const Dying *place = places.data();
    for (const Run &run : runs)
        for (const Dying *end = place + run.outputs.size(); place < end; place++)
            if (place->input == NOWHERE && !seems_dead(run.list, place->index, place->address))
                return false;
    return true;
}

bool Mortal::find_among(std::vector<Watched> *inputs) {
    if (runs.empty() || !places.empty())
        return false;
    std::unordered_map<const void *, size_t> by_object;
    for (size_t i = 0; i < inputs->size(); i++)
        by_object.emplace((*inputs)[i].known.object, i);
    for (const Run &run : runs)
        for (const Watched &output : run.outputs) {
            const auto place = by_object.find(output.known.object);
            places.push_back({place == by_object.end() ? NOWHERE : place->second, output.index, output.address});
            if (place != by_object.end())
                (*inputs)[place->second].dies = true;
        }
    return true;
}

bool Mortal::take(PyObject *given) {
    PyObject *groups = nullptr, *asked = nullptr;
    if (given == Py_None)
        return true;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "O!O", &PyTuple_Type, &groups, &asked)) {
        PyErr_SetString(PyExc_TypeError, "expected groups of outputs and what to ask");
        return false;
    }
    ask = Py_NewRef(asked);
    for (Py_ssize_t g = 0; g < PyTuple_GET_SIZE(groups); g++) {
        PyObject *list = nullptr, *bytes = nullptr;
        Packed<Place> outputs;
        if (!is_tuple(PyTuple_GET_ITEM(groups, g)) ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(groups, g), "O!O", &PyList_Type, &list, &bytes) || !outputs.take(bytes))
            return false;
        runs.push_back({Py_NewRef(list), {}});
        for (Py_ssize_t i = 0; i < outputs.count; i++)
            runs.back().outputs.push_back({outputs[i].index, outputs[i].address, {}});
    }
    return true;
}

int Mortal::visit(visitproc visit, void *arg) const {
    Py_VISIT(ask);
    for (const Run &run : runs)
        Py_VISIT(run.list);
    return 0;
}

void Mortal::clear() {
    Py_CLEAR(ask);
    for (Run &run : runs)
        Py_CLEAR(run.list);
    runs.clear();
}

int Mortal::are_dead(bool *asked) {
    if (ask == nullptr || seem_dead())
        return 1;
    if (PyErr_Occurred())
        return -1;
    *asked = true;
    Ref answer(PyObject_CallNoArgs(ask));
    return answer ? PyObject_IsTrue(answer.get()) : -1;
}

bool Mortal::seem_dead() {
    for (Run &run : runs)
        for (size_t i = 0; i < run.outputs.size(); i++) {
            load_ahead<&Watched::load_references>(run.outputs, i);
            Watched &output = run.outputs[i];
            if (!seems_dead(run.list, output.index, output.address))
                return false;
            output.known.note(item_of(run.list, output.index));
        }
    return true;
}
