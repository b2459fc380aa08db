"""An agent with a tool, for models that know calls: rollout.agent=slipstream.rollout.agents.games.calculator:solve.

    user: 37 * 4 - 140?   assistant calls calculate("37 * 4 - 140")   tool: 8   assistant: It is 8.

Rows have the columns `prompt` and `answer`. rollout.episodes.tool_parser must name the parser of the model's family.
"""

import ast
import operator

from slipstream.conf.json_files import JsonObject
from slipstream.rollout.agents.session import Session

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out an arithmetic expression of numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
MAX_TURNS = 4
MAX_CHARACTERS = 200
"""The length of an expression, which bounds the size of its numbers, too."""
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it. Nothing else is evaluated."""
    try:
        if len(expression) > MAX_CHARACTERS:
            return "error: the expression is too long"
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError) as e:
        return f"error: {e}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case _:
            raise ValueError("only numbers, + - * / and parentheses")


async def solve(task: JsonObject, session: Session) -> float:
    """1 if the last number that the model says is the answer. Needs rollout.episodes.tool_parser."""
    messages = task["prompt"] if isinstance(task["prompt"], list) else [{"role": "user", "content": task["prompt"]}]
    messages = list(messages)
    for _ in range(MAX_TURNS):
        reply = await session.chat(messages, tools=TOOLS)
        if not reply.tool_calls:
            words = reply.text.replace("$", " ").rstrip(". ").split()
            return float(bool(words) and words[-1] == str(task["answer"]))
        messages.append(reply.message)
        for call in reply.tool_calls:
            is_ours = call.name == "calculate" and isinstance(call.arguments, dict)
            expression = call.arguments.get("expression", "") if isinstance(call.arguments, dict) else ""
            messages.append(call.result(calculate(str(expression)) if is_ours else f"error: no tool {call.name}"))
    return 0.0
