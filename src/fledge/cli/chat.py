"""`fledge chat`: a conversation with the target."""

import contextlib
import sys
from typing import Annotated

import typer

from fledge.cli import options
from fledge.cli.conversation import Conversation
from fledge.cli.drafting import choose_drafting
from fledge.cli.engine_options import CopiesOption, TunedOption, TypedDrafting
from fledge.cli.loading import Loaded, load
from fledge.cli.render import count, figures, say
from fledge.contracts.errors import FledgeError, RequestError
from fledge.contracts.outputs import Completion
from fledge.contracts.recipe import DEFAULT_TARGET
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import DEFAULT_HEAD

_PROMPT = "> "
_MAX_TOKENS = 1024
_HELP = """\
/help    this list
/reset   start a new conversation
/retry   send the last unanswered message again
/quit    leave (so does Ctrl-D)
Ctrl-C   stop the answer and go on with the conversation"""

SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="What the target is told before the first turn."),
]


def chat(
    target: options.TargetOption = DEFAULT_TARGET,
    head: options.HeadOption = DEFAULT_HEAD,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    system: SystemOption = None,
    max_tokens: options.MaxTokensOption = _MAX_TOKENS,
    temperature: options.TemperatureOption = options.SAMPLING.temperature,
    top_k: options.TopKOption = options.SAMPLING.top_k,
    top_p: options.TopPOption = options.SAMPLING.top_p,
    min_p: options.MinPOption = options.SAMPLING.min_p,
    repetition_penalty: options.RepetitionPenaltyOption = options.SAMPLING.repetition_penalty,
    presence_penalty: options.PresencePenaltyOption = options.SAMPLING.presence_penalty,
    frequency_penalty: options.FrequencyPenaltyOption = options.SAMPLING.frequency_penalty,
    seed: options.SeedOption = options.SAMPLING.seed,
    stop: options.StopOption = None,
    depth: options.DepthOption = None,
    width: options.WidthOption = None,
    budget: options.BudgetOption = None,
    accept: options.AcceptOption = options.ENGINE.accept,
    controller: options.ControllerOption = None,
    copies: CopiesOption = options.ENGINE.copies,
    tuned: TunedOption = None,
) -> None:
    """Talk with the target, turn by turn.

    Answers stream to stdout, figures go to stderr. Type /help for the commands. Lines may also
    come from a pipe, one message each.

    Example: [cyan]fledge chat --system "Answer in one sentence." --temperature 0.7[/cyan]
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    drafting = choose_drafting(
        head,
        target=target,
        tuned=tuned,
        typed=TypedDrafting(
            depth=depth, width=width, budget=budget, controller=controller, copies=copies
        ),
    )
    loaded = load(
        drafting.choice(target, dtype=dtype, device=device, accept=accept, max_requests=1)
    )
    tokenizer = loaded.engine.target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise RequestError(
            f"{target} has no chat template, so it cannot hold a conversation; "
            'try `fledge generate --raw --prompt "..."`.'
        )
    exit_code = _Session(loaded, Conversation(loaded.engine, params, system)).run()
    if exit_code:
        raise typer.Exit(exit_code)


class _Session:
    """Reads lines until there are no more."""

    def __init__(self, loaded: Loaded, conversation: Conversation) -> None:
        self._loaded, self._conversation = loaded, conversation
        self._is_interactive = sys.stdin.isatty()
        self._exit_code = 0

    def run(self) -> int:
        """The exit code: 0, or that of the last message a pipe sent that was not answered."""
        if self._is_interactive:
            say("Type a message; /help lists the commands, Ctrl-D ends.")
        while self._take_turn():
            pass
        return 0 if self._is_interactive else self._exit_code

    def _take_turn(self) -> bool:
        """Read a line and do what it asks for; False at the end."""
        try:
            line = _read_terminal() if self._is_interactive else sys.stdin.readline()
            return bool(line) and self._obey(line.strip())
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            say("\n(Ctrl-D or /quit to leave)")
            return True

    def _obey(self, line: str) -> bool:
        """Do what a line asks for; False when it asks to leave."""
        if line == "/quit":
            return False
        if line == "/help":
            say(_HELP)
        elif line == "/reset":
            self._conversation.reset()
            say("new conversation")
        elif line == "/retry":
            self._retry()
        elif line.startswith("/"):
            self._refuse(RequestError(f"unknown command {line.split()[0]!r}; /help lists them."))
        elif line:
            self._ask(line)
        return True

    def _retry(self) -> None:
        message = self._conversation.unanswered
        if message is None:
            self._refuse(RequestError("every message has been answered; there is none to retry."))
        else:
            self._ask(message)

    def _ask(self, message: str) -> None:
        try:
            turn = self._conversation.ask(message)
        except RequestError as error:
            self._refuse(error)
            say(
                f"The conversation is as before ({count(self._conversation.num_turns, 'turn')}) "
                "and your message is kept: /reset starts a new conversation, /retry sends the "
                "message again."
            )
            return
        if turn.completion is not None:
            say(self._describe(turn.completion))
        elif not self._is_interactive:
            raise KeyboardInterrupt
        elif turn.text:
            say("stopped; the conversation goes on with what was said so far")
        else:
            say("stopped before the answer began; /retry asks again")

    def _describe(self, completion: Completion) -> str:
        num_used = len(completion.prompt_token_ids) + len(completion.token_ids)
        context = f"context {num_used:,} of {self._loaded.engine.target.context_len:,}"
        return f"{figures(completion)} · {context}"

    def _refuse(self, error: FledgeError) -> None:
        print(f"error: {error}", file=sys.stderr, flush=True)
        self._exit_code = error.exit_code


def _read_terminal() -> str:
    """A line with its line break, edited where the system offers that; empty at the end."""
    if not sys.stdout.isatty():
        print(_PROMPT, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it is what gives `input` its editing keys)
    try:
        return input(_PROMPT) + "\n"
    except EOFError:
        say("")
        return ""
