/* The first of many choices that may fit: pygraph_trees.native._fast_path.CandidateFilter.

   CandidateFilter(count, held, places)(begin, inputs) returns the first choice, from number `begin` on, that is not
   ruled out for a list of inputs, or `count`. It looks at each output and each input once. Once at most one choice is
   left, it asks nothing more, so the result may not fit. native/DESIGN.md describes the arguments. */

#include "fast_path.h"

#include <bit>

using namespace pygraph;

namespace {

/* Takes a row of bits, which must have `words` words; returns where it begins, or -1 with an exception. */
Py_ssize_t take_row(PyObject *bytes, size_t words, std::vector<uint64_t> *rows) {
    const size_t before = rows->size();
    if (!unpack(bytes, rows))
        return -1;
    if (rows->size() - before != words) {
        PyErr_SetString(PyExc_ValueError, "expected rows with a bit for each choice");
        return -1;
    }
    return static_cast<Py_ssize_t>(before);
}

bool take_held(PyObject *items, CandidateFilter::State *state) {
    Items given;
    if (!given.take(items))
        return false;
    for (Py_ssize_t i = 0; i < given.count; i++) {
        PyObject *list, *bytes;
        unsigned long long index = 0;
        if (!is_tuple(given.at[i]) || !PyArg_ParseTuple(given.at[i], "O!KO", &PyList_Type, &list, &index, &bytes))
            return false;
        const Py_ssize_t row = take_row(bytes, state->words, &state->rows);
        if (row < 0)
            return false;
        state->held.push_back({Py_NewRef(list), index, static_cast<size_t>(row)});
    }
    return true;
}

bool take_places(PyObject *items, CandidateFilter::State *state) {
    Items given;
    if (!given.take(items))
        return false;
    for (Py_ssize_t i = 0; i < given.count; i++) {
        PyObject *bytes, *addresses, *address, *those;
        unsigned long long index = 0;
        if (!is_tuple(given.at[i]) || !PyArg_ParseTuple(given.at[i], "KOO!", &index, &bytes, &PyDict_Type, &addresses))
            return false;
        const Py_ssize_t row = take_row(bytes, state->words, &state->rows);
        if (row < 0)
            return false;
        CandidateFilter::Input input{index, static_cast<size_t>(row), {}};
        for (Py_ssize_t position = 0; PyDict_Next(addresses, &position, &address, &those);) {
            const uint64_t number = PyLong_AsUnsignedLongLong(address);
            const Py_ssize_t found = PyErr_Occurred() ? -1 : take_row(those, state->words, &state->rows);
            if (found < 0)
                return false;
            input.addresses.emplace_back(number, static_cast<size_t>(found));
        }
        std::sort(input.addresses.begin(), input.addresses.end());
        state->places.push_back(std::move(input));
    }
    return true;
}

PyObject *make_candidate_filter(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"count", "held", "places", nullptr};
    PyObject *held, *places;
    Py_ssize_t count = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "nOO", const_cast<char **>(known), &count, &held, &places))
        return nullptr;
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<CandidateFilter *>(made.get())->state = new CandidateFilter::State;
    state->count = static_cast<size_t>(std::max<Py_ssize_t>(count, 0));
    state->words = (state->count + 63) / 64;
    return take_held(held, state) && take_places(places, state) ? made.release() : nullptr;
}

int candidate_filter_traverse(PyObject *self, visitproc visit, void *arg) {
    const auto *state = reinterpret_cast<CandidateFilter *>(self)->state;
    Py_VISIT(Py_TYPE(self));
    if (state != nullptr)
        for (const CandidateFilter::Output &output : state->held)
            Py_VISIT(output.list);
    return 0;
}

int candidate_filter_clear(PyObject *self) {
    auto *state = reinterpret_cast<CandidateFilter *>(self)->state;
    reinterpret_cast<CandidateFilter *>(self)->state = nullptr;
    if (state != nullptr)
        for (const CandidateFilter::Output &output : state->held)
            Py_DECREF(output.list);
    delete state;
    return 0;
}

void candidate_filter_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    candidate_filter_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *candidate_filter_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    PyObject *list;
    Py_ssize_t begin = 0;
    const auto *state = reinterpret_cast<CandidateFilter *>(self)->state;
    if (!PyArg_ParseTuple(arguments, "nO!", &begin, &PyList_Type, &list))
        return nullptr;
    if ((keywords != nullptr && PyDict_GET_SIZE(keywords) > 0) || state == nullptr) {
        PyErr_SetString(PyExc_TypeError, "expected a number and inputs");
        return nullptr;
    }
    return translated([&]() -> PyObject * {
        size_t position = static_cast<size_t>(std::max<Py_ssize_t>(begin, 0));
        if (!sift(state, Inputs{list, nullptr}, &position)) {
            PyErr_SetString(PyExc_TypeError, "expected a tensor at each index");
            return nullptr;
        }
        return PyLong_FromSize_t(position);
    });
}

PyType_Slot candidate_filter_slots[] = {
    {Py_tp_doc, const_cast<char *>("The first of many choices that may fit; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_candidate_filter>)},
    {Py_tp_dealloc, reinterpret_cast<void *>(candidate_filter_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(candidate_filter_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(candidate_filter_clear)},
    {Py_tp_call, reinterpret_cast<void *>(candidate_filter_call)},
    {0, nullptr},
};

/* Whether at most one choice is left in a row. */
bool is_decided(const std::vector<uint64_t> &left) {
    int count = 0;
    for (const uint64_t word : left)
        count += std::popcount(word);
    return count <= 1;
}

} // namespace

PyType_Spec pygraph::candidate_filter_spec = {
    "pygraph_trees.native._fast_path.CandidateFilter", sizeof(CandidateFilter), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, candidate_filter_slots,
};

CandidateFilter::State *pygraph::candidate_filter_in(PyObject *object) {
    return Py_TYPE(object)->tp_dealloc == candidate_filter_dealloc ? reinterpret_cast<CandidateFilter *>(object)->state : nullptr;
}

bool pygraph::sift(const CandidateFilter::State *state, const Inputs &inputs, size_t *position) {
    std::vector<uint64_t> left(state->words);
    for (size_t number = *position; number < state->count; number++)
        left[number / 64] |= uint64_t{1} << (number % 64);
    for (auto output = state->held.begin(); output < state->held.end() && !is_decided(left); output++) {
        PyObject *object = output->index < static_cast<uint64_t>(PyList_GET_SIZE(output->list))
                               ? PyList_GET_ITEM(output->list, static_cast<Py_ssize_t>(output->index))
                               : Py_None;
        if (object != Py_None && Py_REFCNT(object) != 1)
            for (size_t i = 0; i < state->words; i++)
                left[i] &= ~state->rows[output->row + i];
    }
    for (auto input = state->places.begin(); input < state->places.end() && !is_decided(left); input++) {
        PyObject *object = inputs.at(input->index);
        if (object == nullptr || !is_tensor(object))
            return false;
        const uint64_t address = reinterpret_cast<uintptr_t>(THPVariable_Unpack(object).data_ptr());
        const auto here = std::lower_bound(input->addresses.begin(), input->addresses.end(),
                                           std::pair<uint64_t, size_t>(address, 0));
        const bool is_known = here != input->addresses.end() && here->first == address;
        for (size_t i = 0; i < state->words; i++)
            left[i] &= ~state->rows[input->row + i] | (is_known ? state->rows[here->second + i] : 0);
    }
    size_t word = 0;
    while (word < left.size() && left[word] == 0)
        word++;
    *position = word < left.size() ? word * 64 + static_cast<size_t>(std::countr_zero(left[word])) : state->count;
    return true;
}
