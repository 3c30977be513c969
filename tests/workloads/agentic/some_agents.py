"""Agents for tests of the endpoint: by hand over HTTP, with the openai client, with a framework."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from m2flow.tools import Toolbox, ToolCall, make_tools
from m2flow.workloads.agentic.endpoint.agents import Endpoint

BOX = Toolbox(make_tools([("calculator", {})]))
SEEN: dict[str, list[Any]] = {}
"""By key what an agent was told."""


def ask(endpoint: Endpoint, key: str | None = None, path: str = "", **body: Any) -> Any:
    """Status and content of a request."""
    request = urllib.request.Request(
        f"{endpoint.base_url}{path or '/chat/completions'}",
        json.dumps({"model": endpoint.model, **body}).encode(),
        {"Authorization": f"Bearer {key or endpoint.key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask_for_stream(endpoint: Endpoint, **body: Any) -> list[Any]:
    """The events of an answer that comes as a stream, the last one without its data."""
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "stream": True, **body}).encode(),
        {"Authorization": f"Bearer {endpoint.key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        *events, end, nothing = answer.read().decode().split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def answers(calls: Any) -> list[dict[str, Any]]:
    """What the calculator says to the calls of a message."""
    asked = [ToolCall(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    found = BOX.carry_out(asked)
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": answer.text}
        for call, answer in zip(calls, found, strict=True)
    ]


def by_hand(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """The loop of tools over plain HTTP."""
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    while True:
        status, answer = ask(endpoint, messages=messages, tools=BOX.schemas())
        if status != 200:
            return
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls")
        if not calls:
            return
        messages += [message, *answers(calls)]


async def with_streams(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """The loop of tools with the official client, whose answers come as streams."""
    import openai

    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0
    ) as client:
        while True:
            tools: Any = BOX.schemas()
            try:
                async with client.chat.completions.stream(
                    model=endpoint.model, messages=messages, tools=tools
                ) as stream:
                    answer = await stream.get_final_completion()
            except openai.BadRequestError:
                return
            message = answer.choices[0].message
            if not message.tool_calls:
                return
            told = message.model_dump(exclude_none=True, exclude={"parsed"})
            for call in told["tool_calls"]:
                call["function"].pop("parsed_arguments", None)
            messages += [told, *answers(told["tool_calls"])]


async def with_client(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """The same with the official client."""
    import openai

    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0
    ) as client:
        while True:
            tools: Any = BOX.schemas()
            try:
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=tools
                )
            except openai.BadRequestError:
                return
            message = answer.choices[0].message
            if not message.tool_calls:
                return
            told = message.model_dump(exclude_none=True)
            messages += [told, *answers(told["tool_calls"])]


async def with_framework(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """An agent of openai-agents, with a tool of its own."""
    import openai
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    @function_tool
    def calculator(formula: str) -> str:
        """Compute a formula."""
        return BOX.carry_out([ToolCall("calculator", formula)])[0].text

    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0
    ) as client:
        model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
        agent = Agent(name="solver", tools=[calculator], model=model)
        settings = RunConfig(tracing_disabled=True)
        try:
            await Runner.run(agent, problem["prompt"], max_turns=10, run_config=settings)
        except openai.BadRequestError:
            return


def wander(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """A random dialogue: any texts, by the user and by tools, and now and then a request twice."""
    draw = random.Random(problem["prompt"] + endpoint.key)
    messages: list[Any] = [{"role": "system", "content": "été"}] * draw.randint(0, 1)
    messages += [{"role": "user", "content": problem["prompt"]}]
    for _ in range(draw.randint(1, 5)):
        status, answer = ask(endpoint, messages=messages, max_tokens=draw.randint(1, 9))
        if status != 200:
            return
        if draw.random() < 0.3:
            assert ask(endpoint, messages=messages)[1]["choices"] == answer["choices"]
        messages.append(answer["choices"][0]["message"])
        for _ in range(draw.randint(1, 2)):
            text = "".join(draw.choices("ab <eos>(end)€日\n", k=draw.randint(0, 12)))
            role = draw.choice(["user", "tool"])
            messages.append({"role": role, "content": text, "tool_call_id": "x"})


def rude(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Asks for what is not served; what came back is in `SEEN`."""
    first = [{"role": "user", "content": "hello"}]
    told = SEEN.setdefault(problem["prompt"], [])
    told.append(ask(endpoint, key="guessed", messages=first))
    told.append(ask(endpoint, path="/embeddings", messages=first))
    for wrong in ({"stop": ["a"]}, {"temperature": 0.3}, {"n": 2}, {"max_tokens": 0}, {}):
        told.append(ask(endpoint, **wrong))
    told.append(ask(endpoint, messages=[{"role": "user", "content": 3}]))
    status, answer = ask(endpoint, messages=first, temperature=1.0, top_p=1)
    told.append((status, answer))
    SEEN["stream"] = ask_for_stream(
        endpoint, messages=first, stream_options={"include_usage": True}
    )
    reply = answer["choices"][0]["message"]
    told.append(ask(endpoint, messages=[*first, {**reply, "content": "other"}, *first]))
    told.append(ask(endpoint, messages=[*first, reply]))
    told.append(ask(endpoint, messages=[*first, reply, *first], tools=BOX.schemas()))


def goes_on(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Asks for more until it is refused, and ends as if it were done."""
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    while True:
        status, answer = ask(endpoint, messages=messages)
        if status != 200:
            return
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "more " * 60}]


def verbose(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Begins with instructions that are too long, and ends as if it were done."""
    system = {"role": "system", "content": "Be brief. " * 60}
    ask(endpoint, messages=[system, {"role": "user", "content": problem["prompt"]}])


def troubled(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Raises, hangs, asks nothing, or does what it should, as its number says."""
    number = SEEN.setdefault("troubled", [])
    number.append(0)
    match len(number):
        case 1:
            raise RuntimeError("no idea")
        case 2:
            time.sleep(30)
        case 3:
            return
    by_hand(problem, endpoint)


def exact(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Says the temperature of the recipe, as frameworks do, and what else is no mistake."""
    status, reply = ask(
        endpoint, messages=[{"role": "user", "content": "Hi"}], temperature=1.0, stream_options={}
    )
    assert status == 200, reply


def takes(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Uses up what it is told."""
    problem["metadata"]["hints"].pop()
    ask(endpoint, messages=[{"role": "user", "content": problem["prompt"]}])
