"""HLO text by hand."""

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(*lines: str, before: str = "", header: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule by_hand{header}\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


def call(target: str, operands: list[str], result: str, rest: str = "") -> str:
    """A program with one library call."""
    lines = [f"%p{n} = {shape} parameter({n})" for n, shape in enumerate(operands)]
    names = ", ".join(f"%p{n}" for n in range(len(operands)))
    last = f'ROOT %call = {result} custom-call({names}), custom_call_target="{target}"{rest}'
    return module(*lines, last)
