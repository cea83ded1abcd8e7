"""Frameworks that call the server: LangChain, an agent of OpenAI's Agents SDK and Anthropic's tool runner."""

import asyncio
from contextlib import closing

import pytest
from live_server import KEY, running, small_model
from scripted_answers import scripted

from penstock.server.templates import WorldTemplate

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def live():
    with running(small_model(), template=WorldTemplate(), api_key=KEY) as one:
        yield one
        one.settles()


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def test_langchain_answers_streams_and_calls_tools(live):
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain.ChatOpenAI(model="tiny", base_url=f"{live.url}/v1", api_key=KEY, max_tokens=200, max_retries=0)
    with scripted(live.engine, "Good morning.", "A stream."):
        assert model.invoke("Hello").content == "Good morning."
        assert "".join(piece.text for piece in model.stream("Hello")) == "A stream."
    question = HumanMessage("Weather in Oslo?")
    with scripted(live.engine, CALL, "It rains.") as prompts:
        bound = model.bind_tools([weather])
        asked = bound.invoke([question])
        (call,) = asked.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
        answer = bound.invoke([question, asked, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])])
    assert answer.content == "It rains."
    assert "Tell the weather of a city." in prompts[0]
    assert "rain in Oslo" in prompts[1]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_uses_a_tool(live, api):
    agents = pytest.importorskip("agents")
    import openai

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            agent = agents.Agent(
                name="helper", instructions="Answer.", tools=[agents.function_tool(weather)], model=kind("tiny", client),
                model_settings=agents.ModelSettings(max_tokens=200),
            )  # fmt: skip
            return await agents.Runner.run(agent, "Weather in Oslo?", run_config=agents.RunConfig(tracing_disabled=True))

    with scripted(live.engine, CALL, "It rains.") as prompts:
        found = asyncio.run(run())
    assert found.final_output == "It rains."
    assert "rain in Oslo" in prompts[1]


def test_anthropics_tool_runner(live):
    anthropic = pytest.importorskip("anthropic")
    if not hasattr(anthropic, "beta_tool"):
        pytest.skip("an older client")
    given = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "Weather in Oslo?"}]}
    with closing(anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0)) as client:
        for stream in False, True:
            runner = client.beta.messages.tool_runner(**given, tools=[anthropic.beta_tool(weather)], stream=stream, thread=False)
            with scripted(live.engine, CALL, "It rains.") as prompts:
                *_, last = ([*one, one.get_final_message()][-1] if stream else one for one in runner)
            assert [block.text for block in last.content] == ["It rains."]
            assert "Tell the weather of a city." in prompts[0]
            assert "rain in Oslo" in prompts[1]
