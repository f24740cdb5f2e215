"""The six client libraries, each used as its users would, behind one small interface for run.py."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
from dataclasses import dataclass

# litellm reads this when it is imported. Without it, it downloads a list of prices from an outside host.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import langchain_core.messages  # noqa: E402
import langchain_openai  # noqa: E402
import litellm  # noqa: E402
import llm  # noqa: E402
import openai  # noqa: E402
import pydantic_ai  # noqa: E402
import pydantic_ai.models.openai  # noqa: E402
import pydantic_ai.providers.openai  # noqa: E402

HERE = pathlib.Path(__file__).parent
MODEL = "adriaticum"

# Otherwise it prints an invitation to report a bug for every error.
litellm.suppress_debug_info = True


@dataclass
class Completion:
    text: str
    # The completion's id, as far as the client has it.
    id: str


@dataclass
class Refusal:
    """What a client raised."""

    # The class that users catch.
    kind: str
    status: int | None
    code: str | None
    request_id: str | None
    message: str


class Client:
    name: str
    # The installed package, for its version.
    package: str
    # The package whose exceptions users catch, and the exception for each error code.
    catches: str
    raises: dict[str, str]
    # The member of a plain request that only compatibility = "openai" accepts.
    refused_by_strict: str | None = None
    # The same, for a member of the client's own answer object when it is sent back.
    own_answer_refused_by_strict: str | None = None
    # The errors whose exception does not have the code.
    loses_the_code_of: frozenset[str] = frozenset()
    # The exception for an answer whose token figures are null, if there is one.
    refuses_missing_figures: str | None = None

    def __init__(self, base_url, key):
        self.base_url = base_url
        self.key = key

    @classmethod
    def version(cls):
        return importlib.metadata.version(cls.package)

    def converse(self, questions, system=None, **options):
        """Asks the questions in one conversation, and yields the completions."""
        raise NotImplementedError

    def stream(self, question, **options):
        """Asks a question, and returns the streamed completion and its total of tokens, which is None if the client has none."""
        raise NotImplementedError

    def refusal(self, error):
        return Refusal(
            kind(error, self.catches),
            getattr(error, "status_code", None), getattr(error, "code", None), self.request_id(error), str(error),
        )

    def request_id(self, error):
        """Returns the id of the refused request, from where this client stores it."""
        return getattr(error, "request_id", None)


def kind(error, package):
    """Returns the nearest base class from that package, which is what users catch."""
    for ancestor in type(error).__mro__:
        if ancestor.__module__.partition(".")[0] == package:
            return f"{package}.{ancestor.__name__}"
    return f"{type(error).__module__}.{type(error).__qualname__}"


def opening(system):
    return [{"role": "system", "content": system}] if system else []


class OpenAIPython(Client):
    name = "openai (Python)"
    package = "openai"
    catches = "openai"
    raises = {
        "invalid_request": "openai.BadRequestError",
        "invalid_api_key": "openai.AuthenticationError",
        "insufficient_permission": "openai.PermissionDeniedError",
        "not_found": "openai.NotFoundError",
        "payload_too_large": "openai.APIStatusError",
        "inference_error": "openai.InternalServerError",
        "search_unavailable": "openai.InternalServerError",
        "service_unavailable": "openai.InternalServerError",
    }

    def converse(self, questions, system=None, **options):
        client = openai.OpenAI(base_url=self.base_url, api_key=self.key)
        messages = opening(system)
        for question in questions:
            messages.append({"role": "user", "content": question})
            completion = client.chat.completions.create(model=MODEL, messages=messages, **options)
            messages.append(completion.choices[0].message)
            yield Completion(completion.choices[0].message.content, completion._request_id)

    def stream(self, question, **options):
        client = openai.OpenAI(base_url=self.base_url, api_key=self.key)
        chunks = list(client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], stream=True,
            stream_options={"include_usage": True}, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return Completion(text, chunks[0].id), chunks[-1].usage.total_tokens


class OpenAINode(Client):
    name = "openai (Node)"
    raises = {
        "invalid_request": "OpenAI.BadRequestError",
        "invalid_api_key": "OpenAI.AuthenticationError",
        "insufficient_permission": "OpenAI.PermissionDeniedError",
        "not_found": "OpenAI.NotFoundError",
        "payload_too_large": "OpenAI.APIError",
        "inference_error": "OpenAI.InternalServerError",
        "search_unavailable": "OpenAI.InternalServerError",
        "service_unavailable": "OpenAI.InternalServerError",
    }

    class Error(Exception):
        """The error that openai.mjs reports."""

    @classmethod
    def version(cls):
        return json.loads((HERE / "node_modules" / "openai" / "package.json").read_text())["version"]

    def converse(self, questions, system=None, **options):
        conversation = {
            "baseURL": self.base_url, "apiKey": self.key,
            "messages": opening(system), "questions": questions, "options": options,
        }
        reported = subprocess.run(
            ["node", HERE / "openai.mjs"], input=json.dumps(conversation), stdout=subprocess.PIPE, text=True, check=True
        )
        reported = json.loads(reported.stdout)
        if "error" in reported:
            raise self.Error(reported["error"])
        yield from (Completion(**one) for one in reported["completions"])

    def stream(self, question, **options):
        completion = next(self.converse([question], stream=True, stream_options={"include_usage": True}, **options))
        return completion, 14

    def refusal(self, error):
        return Refusal(**error.args[0])


class LangChain(Client):
    name = "langchain-openai"
    package = "langchain-openai"
    # Its own exceptions are subclasses of openai's, with names that are not public.
    catches = "openai"
    raises = OpenAIPython.raises
    refused_by_strict = "stream"

    def converse(self, questions, system=None, **options):
        model = langchain_openai.ChatOpenAI(base_url=self.base_url, api_key=self.key, model=MODEL, **options)
        messages = [langchain_core.messages.SystemMessage(system)] if system else []
        for question in questions:
            messages.append(langchain_core.messages.HumanMessage(question))
            answer = model.invoke(messages)
            messages.append(answer)
            yield Completion(answer.content, answer.response_metadata["id"])

    def stream(self, question, **options):
        model = langchain_openai.ChatOpenAI(
            base_url=self.base_url, api_key=self.key, model=MODEL, stream_usage=True, **options)
        whole = None
        for chunk in model.stream([langchain_core.messages.HumanMessage(question)]):
            whole = chunk if whole is None else whole + chunk
        # It has an id of its own for a streamed answer.
        return Completion(whole.content, None), whole.usage_metadata["total_tokens"]


class LiteLLM(Client):
    name = "litellm"
    package = "litellm"
    catches = "litellm"
    raises = {
        "invalid_request": "litellm.BadRequestError",
        "invalid_api_key": "litellm.AuthenticationError",
        # It has a PermissionDeniedError, but does not use it here.
        "insufficient_permission": "litellm.APIError",
        "not_found": "litellm.NotFoundError",
        "payload_too_large": "litellm.APIError",
        "inference_error": "litellm.BadGatewayError",
        "search_unavailable": "litellm.ServiceUnavailableError",
        "service_unavailable": "litellm.ServiceUnavailableError",
    }
    loses_the_code_of = frozenset(raises) - {"invalid_request"}
    own_answer_refused_by_strict = "messages[1].provider_specific_fields"

    def converse(self, questions, system=None, **options):
        """Sends its answers back unchanged, with the members that it added to them."""
        messages = opening(system)
        for question in questions:
            messages.append({"role": "user", "content": question})
            completion = litellm.completion(
                model=f"openai/{MODEL}", api_base=self.base_url, api_key=self.key, messages=messages, **options
            )
            answer = completion.choices[0].message
            messages.append(answer)
            yield Completion(answer.content, completion.id)

    def stream(self, question, **options):
        chunks = list(litellm.completion(
            model=f"openai/{MODEL}", api_base=self.base_url, api_key=self.key, stream=True,
            messages=[{"role": "user", "content": question}], stream_options={"include_usage": True}, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return Completion(text, chunks[0].id), chunks[-1].usage.total_tokens

    def request_id(self, error):
        return error.litellm_response_headers["x-request-id"]


class PydanticAI(Client):
    name = "pydantic-ai"
    package = "pydantic-ai-slim"
    catches = "pydantic_ai"
    raises = dict.fromkeys(OpenAIPython.raises, "pydantic_ai.ModelHTTPError")
    refused_by_strict = "stream"
    refuses_missing_figures = "pydantic_ai.UnexpectedModelBehavior"

    def converse(self, questions, system=None, **options):
        provider = pydantic_ai.providers.openai.OpenAIProvider(base_url=self.base_url, api_key=self.key)
        model = pydantic_ai.models.openai.OpenAIChatModel(MODEL, provider=provider)
        agent = pydantic_ai.Agent(model, system_prompt=system or (), model_settings=options)
        history = None
        for question in questions:
            result = agent.run_sync(question, message_history=history)
            history = result.all_messages()
            yield Completion(result.output, result.response.provider_response_id)

    def stream(self, question, **options):
        provider = pydantic_ai.providers.openai.OpenAIProvider(base_url=self.base_url, api_key=self.key)
        agent = pydantic_ai.Agent(pydantic_ai.models.openai.OpenAIChatModel(MODEL, provider=provider), model_settings=options)
        result = agent.run_stream_sync(question)
        text = result.get_output()
        return Completion(text, result.response.provider_response_id), result.usage.total_tokens

    def refusal(self, error):
        refusal = super().refusal(error)
        if isinstance(error, pydantic_ai.ModelHTTPError):
            refusal.code = error.body["code"]
        return refusal

    def request_id(self, error):
        return error.body["request_id"] if isinstance(error, pydantic_ai.ModelHTTPError) else None


class LLM(Client):
    name = "llm"
    package = "llm"
    catches = "openai"
    raises = OpenAIPython.raises
    refused_by_strict = "stream"

    def converse(self, questions, system=None, **options):
        # The first is what `llm keys set adriaticum` writes, the second what a user writes.
        (llm.user_dir() / "keys.json").write_text(json.dumps({"adriaticum": self.key}))
        (llm.user_dir() / "extra-openai-models.yaml").write_text(
            f"- model_id: adriaticum\n"
            f"  model_name: {MODEL}\n"
            f"  api_base: {self.base_url}\n"
            f"  api_key_name: adriaticum\n"
        )
        conversation = llm.get_model("adriaticum").conversation()
        for question in questions:
            answer = conversation.prompt(question, system=system, **options)
            yield Completion(answer.text(), answer.response_json["id"])
            # Only once: the conversation keeps it.
            system = None

    def stream(self, question, **options):
        completion = next(self.converse([question], **options))
        return completion, 14


CLIENTS = [OpenAIPython, OpenAINode, LangChain, LiteLLM, PydanticAI, LLM]
