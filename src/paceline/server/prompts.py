"""From a conversation to the text of its prompt, through the model's chat template.

Knows nothing of token ids or of how the answer is made.
"""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.server.protocol import Conversation
from paceline.server.tools import ToolUse
from paceline.tokenizer import Tokenizer


def chat_text(tokenizer: Tokenizer, conversation: Conversation, tool_use: ToolUse | None) -> str:
    """The prompt's text; encode it without adding special tokens.

    Raises:
        RequestError: the messages are wrong, or the model's template refuses them.
    """
    conversation.check()
    messages = [m.for_template(f"messages[{i}]") for i, m in enumerate(conversation.messages)]
    continued = bool(conversation.continue_final_message)
    opened = conversation.add_generation_prompt
    text = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=not continued if opened is None else opened,
        tools=None if tool_use is None else tool_use.for_template,
        **(conversation.chat_template_kwargs or {}),
    )
    return _cut_behind(text, messages[-1]["content"]) if continued else text


def _cut_behind(text: str, final: str) -> str:
    """The rendered text up to the end of the last message, as transformers does it.

    Templates put their end of turn behind it, and may have stripped it.
    """
    for words in (final, final.strip()):
        at = text.rfind(words)
        if words and at >= 0:
            return text[: at + len(words)]
    raise RequestError(
        "continue_final_message", "continue_final_message: the last message is not in what the template made"
    )
