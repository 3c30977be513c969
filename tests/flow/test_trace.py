"""Tracing: a step becomes a graph once, and what makes no sense is refused with name and reason."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from m2flow.errors import FlowError, UserError
from m2flow.flow import Batch, Flow, Stream, Worker, loop, stage


class Model(Worker):
    n = 4
    half = 0.5

    @stage
    def score(self, b: Batch) -> Batch:
        return b

    @stage
    def merge(self, a: Batch, b: Batch) -> Batch:
        return a

    @stage(expands="n")
    def sample(self, b: Batch, n: int | None = None) -> Batch:
        return b.repeat(n or self.n)

    @stage(expands="half")
    def sample_half(self, b: Batch) -> Batch:
        return b

    @stage(expands=2)
    def twice(self, b: Batch) -> Batch:
        return b.repeat(2)

    @stage(sticky=True)
    def act(self, b: Batch) -> Batch:
        return b

    @stage(accumulates=True)
    def train(self, b: Batch) -> Batch:
        return b

    @stage(accumulates=True, minibatches="k")
    def train_in_parts(self, b: Batch, *, k: int = 1) -> Batch:
        return b


@stage
def clean(b: Batch) -> Batch:
    return b


@stage(unit="group")
def normalise(b: Batch) -> Batch:
    return b


@stage(sticky=True)
def stuck(b: Batch) -> Batch:
    return b


@stage(accumulates=True)
def folded(b: Batch) -> Batch:
    return b


class Base(Flow):
    model: Model
    other: Model


def traced(step: Callable[[Any, Stream], Any], sync: Callable[[Any], None] | None = None) -> Any:
    """The graph of a flow with these methods and two workers."""
    body = {"step": step, "sync": sync or (lambda self: None)}
    return type("Toy", (Base,), body)(model=Model(), other=Model()).trace()


def refused(step: Callable[[Any, Stream], Any], sync: Callable[[Any], None] | None = None) -> str:
    """The message with which tracing this step fails."""
    with pytest.raises(FlowError) as caught:
        traced(step, sync)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- refusals: the message names the stage and the reason -------------------------------------


def test_a_stream_passed_twice_to_one_call() -> None:
    message = refused(lambda self, x: self.model.merge(x, x))
    assert message.startswith("model.merge: takes the same stream twice")


def test_a_sticky_stream_that_two_stages_read() -> None:
    def step(self: Any, x: Stream) -> Stream:
        x = self.model.act(x)
        return self.model.merge(self.model.score(x), self.other.score(x))

    message = refused(step)
    assert message.startswith("model.act: ")
    assert "model.score and other.score" in message


def test_a_sticky_stream_may_be_read_once() -> None:
    assert traced(lambda self, x: self.model.score(self.model.act(x))).node("model.act").sticky


def test_a_stage_whose_result_nobody_uses() -> None:
    def step(self: Any, x: Stream) -> Stream:
        self.other.score(x)
        return self.model.score(x)

    assert refused(step).startswith("other.score: its result reaches neither the output")


def test_a_stage_that_only_leads_to_a_dead_one() -> None:
    def step(self: Any, x: Stream) -> Stream:
        self.other.score(clean(x))
        return self.model.score(x)

    assert refused(step).startswith("clean: its result reaches neither the output")


def test_a_stage_that_leads_to_accumulated_state_is_alive() -> None:
    def step(self: Any, x: Stream) -> Stream:
        self.model.train(clean(x))
        return self.other.score(x)

    assert len(traced(step).nodes) == 3


def test_groups_that_no_stage_has_made() -> None:
    message = refused(lambda self, x: normalise(x))
    assert message.startswith("normalise: works on groups, but no stage upstream expands")
    assert "expands=n" in message


def test_a_sticky_function_has_no_state() -> None:
    assert refused(lambda self, x: stuck(x)).startswith("stuck: is sticky but has no state")
    assert refused(lambda self, x: folded(x)).startswith("folded: folds items into state, and a f")


def test_one_worker_under_two_names() -> None:
    class Toy(Base):
        def step(self, x: Stream) -> Stream:
            return self.model.score(x)

    model = Model()
    with pytest.raises(FlowError, match="other: is the same worker as model"):
        Toy(model=model, other=model).trace()


def test_a_function_with_the_name_of_a_worker() -> None:
    @stage
    def model(b: Batch) -> Batch:
        return b

    message = refused(lambda self, x: model(self.model.score(x)))
    assert message == "model: is a function with the name of a worker; rename one"


def test_a_join_of_streams_that_count_different_items() -> None:
    message = refused(lambda self, x: self.other.merge(x, self.model.sample(x)))
    assert message.startswith("other.merge: its inputs count different items ([1, 4]")


def test_a_join_of_streams_expanded_in_another_order() -> None:
    """Both have eight items for each source item, but item 5 of one is not item 5 of the other."""

    def step(self: Any, x: Stream) -> Stream:
        a = self.model.sample(self.model.twice(x))
        b = self.other.twice(self.other.sample(x))
        return self.model.merge(a, b)

    assert "([8, 8] for each item of the step)" in refused(step)


def test_the_same_state_folded_into_twice() -> None:
    message = refused(lambda self, x: self.model.train(self.model.train(x)))
    assert message.startswith("model.train#2: folds into the same state as model.train within")


def test_two_workers_of_one_class_fold_into_states_of_their_own() -> None:
    assert len(traced(lambda self, x: self.model.train(self.other.train(x))).nodes) == 2


def test_a_loop_without_an_exit() -> None:
    message = refused(lambda self, x: loop(self.model.score, until="")(x))
    assert message == "loop: a loop without an exit never ends; give `until` or `max_turns`"


def test_a_loop_without_stages_or_turns() -> None:
    assert refused(lambda self, x: loop()(x)) == "loop: a loop needs at least one stage"
    assert "max_turns must be a whole number of at least 1" in refused(
        lambda s, x: loop(s.model.act, max_turns=0)(x)
    )


@pytest.mark.parametrize("member", ["sample", "train"])
def test_what_cannot_stand_in_a_loop(member: str) -> None:
    message = refused(lambda self, x: loop(getattr(self.model, member))(x))
    assert message.startswith(f"{member}: only plain stages on single items")


def test_a_member_of_a_loop_has_no_length() -> None:
    @stage(length="tokens")
    def weigh(b: Batch) -> Batch:
        return b

    message = refused(lambda self, x: loop(self.model.score, weigh)(x))
    assert message.startswith("weigh: declares a length, but in a loop")


def test_lengths_are_declared_by_those_who_read() -> None:
    @stage(length="tokens")
    def weigh(b: Batch) -> Batch:
        return b

    graph = traced(lambda self, x: weigh(loop(self.model.score, self.model.act)(x)))
    assert [graph.length_column(index) for index in range(-1, 3)] == [None, None, "tokens", None]
    assert graph.describe()[2] == "weigh <- model.act  [length=tokens]"
    assert graph.loop_name(0) == "loop(model.score, model.act)"
    with pytest.raises(FlowError, match="length='' is not the name of a column"):
        stage(length="")(lambda b: b)


def test_a_loop_of_something_that_is_no_stage() -> None:
    message = refused(lambda self, x: loop(len)(x))
    assert "is not a stage" in message
    assert "@stage" in message


def test_a_loop_takes_one_stream() -> None:
    assert "takes one Stream" in refused(lambda self, x: loop(self.model.score)(3))


def test_the_inside_of_a_loop_cannot_be_read_from_outside() -> None:
    inner: list[Stream] = []

    def step(self: Any, x: Stream) -> Stream:
        x = loop(self.model.act, self.model.score)(x)
        inner.append(Stream(x.trace, 0))  # what model.act makes
        return self.other.score(inner[0])

    assert refused(step).startswith("model.act: stands inside a loop, so other.score cannot")


def test_a_worker_that_the_flow_does_not_declare() -> None:
    stranger = Model()
    message = refused(lambda self, x: stranger.score(x))
    assert message.startswith("Model: is used in the flow but is not one of its workers")
    assert "attribute of Toy" in message
    assert "is not one of its workers" in refused(lambda self, x: loop(stranger.score)(x))


def test_weights_published_to_a_stranger_or_to_oneself() -> None:
    def step(self: Any, x: Stream) -> Stream:
        return self.model.score(x)

    message = refused(step, lambda self: self.model.publish(Model()))
    assert "is not one of its workers" in message
    message = refused(step, lambda self: self.model.publish(self.model))
    assert message == "model: publishes its weights to itself"


def test_weights_travel_over_one_edge() -> None:
    class Three(Base):
        third: Model

        def step(self, x: Stream) -> Stream:
            return self.model.score(x)

    class Chain(Three):
        def sync(self) -> None:
            self.model.publish(self.other)
            self.other.publish(self.third)

    class ManyToOne(Three):
        def sync(self) -> None:
            self.model.publish(self.third)
            self.other.publish(self.third)

    def each_other(self: Any) -> None:
        self.model.publish(self.other)
        self.other.publish(self.model)

    assert refused(lambda self, x: self.model.score(x), each_other).startswith(
        "other: runs on the weights of model, and publishes weights to model"
    )
    with pytest.raises(FlowError) as caught:
        Chain(model=Model(), other=Model(), third=Model()).trace()
    assert str(caught.value) == (
        "other: runs on the weights of model, and publishes weights to third; "
        "publish from model to each worker that runs on its weights"
    )
    assert len(ManyToOne(model=Model(), other=Model(), third=Model()).trace().weight_edges) == 2


def test_publish_belongs_into_sync() -> None:
    with pytest.raises(FlowError, match=r"Model: publish is a declaration and belongs into Flow\."):
        Model().publish(Model())

    def step(self: Any, x: Stream) -> Stream:
        self.model.publish(self.other)
        return self.model.score(x)

    assert refused(step).startswith("Model: publish is a declaration and belongs into Flow.sync")


def test_a_stream_from_outside_the_step() -> None:
    kept: list[Stream] = []

    def step(self: Any, x: Stream) -> Stream:
        kept.append(x)
        return self.model.score(kept[0])

    traced(step)
    for use in (step, lambda self, x: loop(self.model.score)(kept[0])):
        assert "was given a Stream that was made outside this step" in refused(use)
    with pytest.raises(FlowError, match="score: was given a Stream that was made outside"):
        Model().score(kept[0])


def test_a_stream_returned_from_another_flow() -> None:
    kept: list[Stream] = []

    def step(self: Any, x: Stream) -> Stream:
        kept.append(self.model.score(x))
        return kept[0]

    traced(step)
    assert refused(step).startswith("step: returned a Stream of another flow")


@pytest.mark.parametrize("result", [None, 3, Batch({"x": [1]})])
def test_a_step_that_returns_no_stream(result: object) -> None:
    message = refused(lambda self, x: result)
    assert message.startswith("Toy.step: must return a Stream")
    assert type(result).__name__ in message


def test_a_method_that_the_flow_does_not_have() -> None:
    class Evaluated(Flow):
        def evaluate(self, items: Stream) -> Stream:
            return items

    with pytest.raises(FlowError, match=r"no such method.*did you mean 'evaluate'"):
        Evaluated().trace("evaluat")


def test_a_step_without_stages() -> None:
    assert refused(lambda self, x: x) == "Toy.step: calls no stage on its items"


def test_a_step_that_returns_what_it_was_given() -> None:
    def step(self: Any, x: Stream) -> Stream:
        self.model.train(x)
        return x

    message = refused(step)
    assert message.startswith("Toy.step: returns the items that it was given")
    assert "return what a stage makes of them" in message


def test_constants_go_by_keyword_and_streams_by_position() -> None:
    message = refused(lambda self, x: self.model.merge(x, 3))
    assert message.startswith("model.merge: takes Streams as positional arguments and constants")
    message = refused(lambda self, x: self.model.merge(x, b=x))
    assert message == "model.merge: keyword 'b' is a Stream; pass it by position"


def test_a_stream_given_by_keyword_alone_is_not_passed_through() -> None:
    """A stage that returns its argument would have been left out of the graph without a word."""
    message = refused(lambda self, x: self.model.score(b=x))
    assert message == "model.score: keyword 'b' is a Stream; pass it by position"
    assert (
        refused(lambda self, x: clean(b=x)) == "clean: keyword 'b' is a Stream; pass it by position"
    )


@stage
def scaled(b: Batch, /, *, scale: float, shift: float = 0.0) -> Batch:
    return b


def doubled(function: Callable[..., Batch]) -> Callable[..., Batch]:
    """A decorator whose function takes more than the one that it decorates."""

    @functools.wraps(function)
    def called(b: Batch, times: int = 2) -> Batch:
        return function(b)

    return called


@stage
@doubled
def decorated(b: Batch) -> Batch:
    return b


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "too few": (lambda self, x: self.model.merge(x), "model.merge: .*'b'"),
    "too many": (lambda self, x: clean(x, clean(x)), "clean: .*too many positional arguments"),
    "unknown": (lambda self, x: clean(x, scale=2), "clean: .*unexpected keyword argument 'scale'"),
    "left out": (lambda self, x: scaled(x, shift=2.0), "scaled: .*'scale'"),
    "in a loop": (lambda self, x: loop(self.model.merge)(x), "model.merge: .*'b'"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_the_stage_does_not_take_is_refused(call: str) -> None:
    """A lane raised a TypeError, in the middle of a step."""
    step, words = CALLS[call]
    message = refused(step)
    assert re.match(f"{words}; streams go by position, and constants by keyword$", message), message


def test_a_call_that_the_stage_takes_is_traced() -> None:
    graph = traced(lambda self, x: decorated(scaled(x, scale=2.0), times=3))
    assert [dict(node.options) for node in graph.nodes] == [{"scale": 2.0}, {"times": 3}]


LOOKS = {
    "bool": bool,
    "not": lambda x: not x,
    "len": len,
    "iter": iter,
    "list": list,
    "getitem": lambda x: x["reward"],
    "contains": lambda x: 3 in x,
    "less": lambda x: x < 3,
    "greater or equal": lambda x: x >= 3,
    "equal": lambda x: x == 3,
    "unequal": lambda x: x != 3,
    "attribute": lambda x: x.reward,
    "method": lambda x: x.mean(),
    "int": int,
    "float": float,
    "index": lambda x: [1, 2][x],
    "add": lambda x: x + 1,
    "add from the left": lambda x: 1 + x,
    "divide": lambda x: x / 2,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_the_content_of_a_stream_is_not_known(look: Callable[[Any], Any]) -> None:
    def step(self: Any, x: Stream) -> Stream:
        made = self.model.score(x)
        look(made)
        return made

    message = refused(step)
    assert message.startswith("model.score: the content of a Stream is not known while")
    assert "put what depends on the items into a stage" in message

    def on_the_input(self: Any, x: Stream) -> Stream:
        look(x)
        return self.model.score(x)

    assert refused(on_the_input).startswith("the input of Toy.step: the content of a Stream")


def test_a_stream_can_be_shown_hashed_and_copied() -> None:
    def step(self: Any, x: Stream) -> Stream:
        made = self.model.score(x)
        assert repr(made) == "<Stream model.score>"
        assert len({x, made, made}) == 2
        assert made in {made}
        copy.copy(made)
        return made

    traced(step)


# --- what is allowed --------------------------------------------------------------------------


def test_control_flow_that_does_not_look_at_the_items() -> None:
    class Toy(Base):
        rounds: int = 2
        reference: bool = False

        def step(self, x: Stream) -> Stream:
            for _ in range(self.rounds):
                x = self.model.score(x)
            if self.reference:
                x = self.other.score(x)
            streams = {"x": x}
            return self.model.train(streams["x"])

    def names(**settings: Any) -> list[str]:
        return [n.name for n in Toy(model=Model(), other=Model(), **settings).trace().nodes]

    assert names() == ["model.score", "model.score#2", "model.train"]
    assert names(rounds=1, reference=True) == ["model.score", "other.score", "model.train"]


def test_tracing_starts_nothing_and_can_be_repeated() -> None:
    class Loud(Model):
        def load(self, place: Any) -> None:
            raise AssertionError("tracing must not load")

    class Toy(Base):
        def step(self, x: Stream) -> Stream:
            return self.model.train_in_parts(self.model.sample(x), k=2)

        def sync(self) -> None:
            self.model.publish(self.other)
            self.model.publish(self.other)

        def evaluate(self, x: Stream) -> Stream:
            return self.model.score(x)

    flow = Toy(model=Loud(), other=Loud())
    assert flow.trace() == flow.trace()
    assert len(flow.trace().weight_edges) == 1
    assert flow.trace("evaluate").name == "Toy.evaluate"
    assert flow.trace("evaluate").weight_edges == ()


def test_a_stage_called_with_a_batch_runs() -> None:
    batch = Batch({"x": [1, 2]})
    assert Model().sample(batch)["x"] == [1] * 4 + [2] * 4
    assert clean(batch) is batch


def test_expansion_comes_from_number_keyword_or_attribute() -> None:
    def step(self: Any, x: Stream) -> Stream:
        return self.model.twice(self.model.sample(self.other.sample(x), n=3))

    assert [node.expands for node in traced(step).nodes] == [4, 3, 2]
    message = refused(lambda self, x: self.model.sample(x, n=0))
    assert message.startswith("sample: expands='n' must be a whole number of at least 1 (got 0)")
    assert "(got 0.5)" in refused(lambda self, x: self.model.sample_half(x))
    assert "(got True)" in refused(lambda self, x: self.model.sample(x, n=True))
    message = refused(lambda self, x: self.model.train_in_parts(x))
    assert message.startswith("train_in_parts: minibatches='k' must be a whole number")


# --- the constructor --------------------------------------------------------------------------


def test_undeclared_missing_and_wrong_attributes() -> None:
    with pytest.raises(FlowError, match=r"Base\.modle: is not declared.*did you mean 'model'\?"):
        Base(modle=Model(), other=Model())
    with pytest.raises(FlowError, match=r"Base\.other: is missing"):
        Base(model=Model())
    with pytest.raises(FlowError, match=r"Base\.other: is of the wrong type .*'int'.*Model"):
        Base(model=Model(), other=3)


def test_defaults_and_inherited_attributes() -> None:
    class Toy(Base):
        rate: float = 0.1

    assert Toy(model=Model(), other=Model()).rate == 0.1
    assert Toy(model=Model(), other=Model(), rate=1).rate == 1
    assert set(Toy(model=Model(), other=Model()).workers) == {"model", "other"}


def test_a_flow_error_is_a_user_error() -> None:
    assert issubclass(FlowError, UserError)
    assert issubclass(FlowError, ValueError)


# --- declarations -----------------------------------------------------------------------------


def nothing(b: Batch) -> Batch:
    return b


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ({"unit": "batch"}, "unit 'batch' is not one of item, group, step"),
        ({"streaming": True, "unit": "group"}, "a streaming stage works on single items"),
        ({"streaming": True, "accumulates": True}, "a stage cannot both stream its items on and"),
        ({"accumulates": True, "expands": 2}, "a stage that accumulates cannot expand"),
        ({"minibatches": 2}, "minibatches is declared, but the stage does not accumulate"),
        ({"by_arrival": True}, "by_arrival is declared, but the stage does not accumulate"),
        ({"sticky": True, "unit": "group"}, "a sticky stage works on single items"),
        ({"sticky": True, "unit": "step"}, "a sticky stage works on single items"),
        ({"waits": True, "streaming": True}, "a stage that waits can neither stream"),
        ({"waits": True, "accumulates": True}, "a stage that waits can neither stream"),
        ({"waits": True}, "waits, but is not a generator function"),
    ],
)
def test_declarations_that_contradict_each_other(declaration: dict[str, Any], reason: str) -> None:
    with pytest.raises(FlowError) as caught:
        stage(**declaration)(nothing)
    assert str(caught.value).startswith(f"nothing: {reason}")


def test_a_declaration_that_there_is_not_is_refused() -> None:
    with pytest.raises(FlowError, match=r"^stage: .*'streem'; did you mean 'streaming'\?$"):
        stage(streem=True)(nothing)  # type: ignore[call-overload]


def test_a_function_that_returns_no_batch_when_it_is_called_is_refused() -> None:
    """A stage had `returned a coroutine`, or a generator, once a step ran."""

    async def later(b: Batch) -> Batch:
        return b

    def pieces(b: Batch) -> Any:
        yield b

    async def both(b: Batch) -> Any:
        yield b

    for function in (later, both):
        with pytest.raises(FlowError, match=r"^(later|both): is a coroutine function.*plain"):
            stage(function)
    with pytest.raises(FlowError, match=r"^pieces: is a generator function.*streaming=True.*waits"):
        stage(pieces)
    assert stage(streaming=True)(pieces).spec.streaming


@pytest.mark.parametrize("name", ["workers", "trace", "step"])
def test_a_worker_with_the_name_of_something_of_the_flow(name: str) -> None:
    flow = type("Toy", (Flow,), {"__annotations__": {name: Model}})
    with pytest.raises(FlowError, match=rf"^Toy\.{name}: .*every Flow has; .*another name"):
        flow(**{name: Model()})


def test_who_fills_a_minibatch_comes_from_a_truth_value_keyword_or_attribute() -> None:
    class Learner(Worker):
        early = True

        @stage(accumulates=True, by_arrival="early")
        def train(self, b: Batch, **_: Any) -> Batch: ...

        @stage(accumulates=True)
        def teach(self, b: Batch) -> Batch: ...

    class Trained(Flow):
        learner: Learner

        def step(self, items: Stream) -> Stream:
            return self.learner.teach(self.learner.train(items))

        def late(self, items: Stream) -> Stream:
            return self.learner.train(items, early=False)

        def odd(self, items: Stream) -> Stream:
            return self.learner.train(items, early=1)

    flow = Trained(learner=Learner())
    assert [node.by_arrival for node in flow.trace().nodes] == [True, False]
    assert [node.by_arrival for node in flow.trace("late").nodes] == [False]
    with pytest.raises(FlowError, match="by_arrival='early' must be True or False"):
        flow.trace("odd")


def test_finish_needs_a_stage_that_accumulates() -> None:
    with pytest.raises(FlowError, match="clean: has a finish but does not accumulate"):
        clean.finish(dict)


def test_a_method_alone_needs_its_workers_alone_and_publishes_nothing() -> None:
    class Toy(Base):
        def step(self, items: Stream) -> Stream:
            return self.other.train(self.model.score(items))

        def sync(self) -> None:
            self.other.publish(self.model)

        def evaluate(self, items: Stream) -> Stream:
            return self.model.score(items)

    whole = Toy(model=Model(), other=Model())
    graph = whole.alone("evaluate").trace()
    assert [node.name for node in graph.nodes] == ["model.score"]
    assert not graph.weight_edges
    assert whole.trace().weight_edges, "the whole flow is as it was"


@pytest.mark.parametrize("turns", [2.5, "3", 0])
def test_turns_are_counted_in_whole_numbers(turns: Any) -> None:
    """2.5 was never reached, and items went around for ever."""
    message = refused(lambda self, x: loop(self.model.act, max_turns=turns)(x))
    assert message.startswith("loop: max_turns must be a whole number of at least 1")
    until: Any = len
    message = refused(lambda self, x: loop(self.model.act, until=until, max_turns=2)(x))
    assert message.startswith("loop: until must be the name of a column")


def test_a_stage_by_another_name_than_its_function_is_refused() -> None:
    """A lane raised an AttributeError, in the middle of a step."""

    class Renamed(Model):
        rank = stage(lambda self, b: b)

    class Toy(Flow):
        judge: Renamed

        def step(self, x: Stream) -> Stream:
            return self.judge.rank(x)

    with pytest.raises(FlowError, match=r"^judge\.<lambda>: is no attribute of its worker"):
        Toy(judge=Renamed()).trace()


def fold(self: Any, b: Batch) -> Batch:
    return b


def test_a_finish_that_could_not_be_called_is_refused_where_it_is_declared() -> None:
    def same() -> None: ...

    def fold_finish(self: Any, b: Batch) -> None: ...

    same.__name__ = "fold"
    for function, words in ((same, "the same name"), (fold_finish, "no argument beside")):
        with pytest.raises(FlowError, match=f"^fold: its finish .*{words}"):
            stage(accumulates=True)(fold).finish(function)
