/* The order of replays that share a graph pool: a replay on another stream than the last one waits for it.

   Without that, two functions, or two sizes of one, would use the same memory at the same time. native/DESIGN.md
   describes the events, and the streams that the program names. */

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Stream stream_of(const TreeState *trees, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, static_cast<c10::DeviceIndex>(trees->device)), id);
}

c10::StreamId current_stream(const TreeState *trees) {
    const c10::Device device(CUDA, static_cast<c10::DeviceIndex>(trees->device));
    return c10::impl::VirtualGuardImpl(CUDA).getStream(device).id();
}

/* Torch's own streams have odd numbers, the default one 0; others are pointers. */
bool is_external(c10::StreamId id) { return id != 0 && (id & 1) == 0; }

void wait_for(const c10::Stream &before, const c10::Stream &now) {
    if (before == now)
        return;
    c10::Event event(CUDA);
    event.record(before);
    event.block(now);
}

/* Whether the program named a stream in the present step. */
bool is_of_step(const TreeState &trees, const Use &use) {
    const int is_same =
        trees.generation == nullptr ? 0 : PyObject_RichCompareBool(use.step.dup().get(), trees.generation, Py_EQ);
    if (is_same < 0)
        PyErr_Clear();
    return is_same != 0;
}

/* Waits for all uses: a replay may write to memory that is dead. After the step, what is alive has been moved. */
void wait_for_uses(TreeState *trees, const c10::Stream &now) {
    for (size_t i = trees->uses.size(); i-- > 0;) {
        const c10::Stream stream = trees->uses[i].stream; // a wait may run Python code, which may note other uses
        const bool is_over = !is_of_step(*trees, trees->uses[i]) || trees->uses[i].storage.expired(); // before the wait
        try {
            if (!trees->uses[i].was_waited)
                wait_for(stream, now);
        } catch (const c10::Error &) {
            if (!is_external(stream.id())) // else the program has destroyed it
                throw;
        }
        trees->uses[i].was_waited = is_external(stream.id());
        if (is_over)
            trees->uses.erase(trees->uses.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

/* Torch's question in C, which is never freed; None if there is none. */
PyObject *question() {
    static PyObject *found = nullptr; // protected by the GIL
    if (const char *name = "_cuda_isCurrentStreamCapturing"; found == nullptr)
        found = py::getattr(py::module_::import("torch._C"), name, py::none()).release().ptr();
    return found;
}

/* Whether the program captures the current stream in a graph of its own. */
bool is_captured(const TreeState *trees) {
    if (trees->device < 0 || current_stream(trees) == 0 || question() == Py_None)
        return false; // the default stream cannot be captured
    Ref answer(PyObject_CallNoArgs(question()));
    if (!answer)
        PyErr_Clear(); // no context: nothing is captured
    return answer.get() == Py_True;
}

/* Lets the current stream wait for the last launch, if that was on another one, and notes the current stream. */
void order_streams(TreeState *trees) {
    if (trees->device < 0)
        return;
    const c10::StreamId now = current_stream(trees);
    const bool has_uses = !trees->uses.empty();
    const bool is_same = trees->has_launched && trees->stream == now && !trees->event;
    if ((is_same && !has_uses) || is_captured(trees))
        return; // a capture, which calls without addresses may be in, waits for nothing outside of it
    if (trees->event) // another stream may have the same number by now
        trees->event->block(stream_of(trees, now));
    else if (trees->has_launched)
        wait_for(stream_of(trees, trees->stream), stream_of(trees, now));
    if (has_uses)
        wait_for_uses(trees, stream_of(trees, now));
    trees->event.reset();
    trees->stream = now;
    trees->has_launched = 1;
}

/* Notes that another stream uses a tensor's memory in the pool: launches wait for it until the next step has begun. */
void note_use(TreeState *trees, const at::Tensor &tensor, c10::DeviceIndex device, c10::StreamId id) {
    const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), id);
    auto storage = tensor.storage().getWeakStorageImpl();
    Ref step = Ref::dup(trees->generation == nullptr ? Py_None : trees->generation);
    for (Use &use : trees->uses)
        if (use.storage == storage && use.stream == stream) { // it stays where it is: see wait_for_uses
            use.step = std::move(step);
            use.was_waited = false;
            return;
        }
    trees->uses.push_back({std::move(storage), stream, std::move(step)});
}

/* The streams that the program has named in this step for memory of the pool. */
std::vector<c10::Stream> streams_in_use(const TreeState &trees, const c10::StorageImpl *storage) {
    std::vector<c10::Stream> found;
    for (const Use &use : trees.uses)
        if (use.storage._unsafe_get_target() == storage && is_of_step(trees, use))
            found.push_back(use.stream);
    return found;
}

/* Must be called after a launch. */
void note_launch(TreeState *trees) {
    if (trees->device < 0 || !is_external(trees->stream) || current_stream(trees) != trees->stream)
        return;
    trees->event.emplace(CUDA).record(stream_of(trees, trees->stream));
}

} // namespace
