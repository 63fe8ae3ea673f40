"""Stand-in: events of a trace, as graders and `claw-eval grade` read them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    type: Literal["tool_result"] = "tool_result"
    tool_use_id: str
    content: list[TextBlock]
    is_error: bool = False


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: list[Block]
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(b.text for b in self.content if isinstance(b, TextBlock))


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid")
    trace_id: str
    timestamp: str = ""


class DimensionScores(BaseModel):
    completion: float = 0.0
    robustness: float = 0.0
    communication: float = 0.0
    safety: float = 1.0
    efficiency_turns: int = 0
    efficiency_tokens: int = 0
    efficiency_wall_time_s: float = 0.0


class TraceStart(Event):
    type: Literal["trace_start"] = "trace_start"
    task_id: str
    model: str
    persona: str = "default"


class TokenUsage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    input_tokens: int = 0
    output_tokens: int = 0


class TraceMessage(Event):
    type: Literal["message"] = "message"
    message: Message
    usage: TokenUsage = Field(default_factory=TokenUsage)


class ToolDispatch(Event):
    type: Literal["tool_dispatch"] = "tool_dispatch"
    tool_use_id: str
    tool_name: str
    endpoint_url: str
    request_body: dict[str, Any]
    response_status: int
    response_body: Any
    latency_ms: float


class MediaLoad(Event):
    type: Literal["media_load"] = "media_load"


class AuditSnapshot(Event):
    type: Literal["audit_snapshot"] = "audit_snapshot"
    service_name: str
    audit_url: str
    audit_data: dict[str, Any]


class TraceEnd(Event):
    type: Literal["trace_end"] = "trace_end"
    total_turns: int
    model_input_tokens: int
    model_output_tokens: int
    input_tokens: int
    output_tokens: int
    total_tokens: int
    model_time_s: float
    tool_time_s: float
    other_time_s: float
    wall_time_s: float
    scores: DimensionScores
    task_score: float
    passed: bool
    failure_modes: list[str]
    user_agent_rounds: int
    user_agent_max_rounds: int
    user_agent_done: bool


class GradingResult(Event):
    type: Literal["grading_result"] = "grading_result"
    task_id: str
    scores: DimensionScores
    task_score: float
    passed: bool
    failure_modes: list[str]
    judge_calls: list[dict]
    user_agent_meta: dict
