"""Makes templates.json: small templates of every feature chat templates use, as Python's Jinja2 renders or refuses them.

Run with Jinja2 3.1.6 in this directory. The environment is the one of transformers (utils/chat_template_utils.py).
"""

import json

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    @jinja2.pass_eval_context
    def _same(self, context, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception

variables = {
    "s": "  Hello Wörld\n",
    "n": None,
    "t": True,
    "f": False,
    "i": 42,
    "neg": -7,
    "x": 1.5,
    "big": 1e16,
    "small": 0.00001,
    "whole": 3.0,
    "l": ["b", "a", "C", "a"],
    "nums": [3, 1, 2],
    "empty": [],
    "d": {"zeta": 1, "Alpha": [1, 2.5, None, True], "beta": {"k": "v<&>'\""}},
    "u": "日本語 é 😀 \u2028",
    "ms": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "two"},
        {"role": "tool", "content": "three"},
        {"role": "user", "content": [{"type": "text", "text": "four"}]},
    ],
}

templates = [
    # Printing.
    "{{ s }}|{{ n }}|{{ t }}|{{ f }}|{{ i }}|{{ x }}|{{ whole }}|{{ big }}|{{ small }}",
    "{{ l }}|{{ d }}|{{ u }}|{{ empty }}|{{ {} }}|{{ (1, 'a') }}|{{ (1,) }}|{{ [big, small] }}",
    "{{ ['it\\'s', 'q\"q', 'both\\'\"', 'tab\\t', 'é😀'] }}",
    "{{ missing }}|{{ d.missing }}|{{ missing is defined }}|{{ d.missing is defined }}|{{ n is defined }}",
    "{{ missing.attribute }}",
    "{{ d.missing.attribute }}",
    "{{ missing['x'] }}",
    "{{ n.attribute }}|{{ n['x'] }}|{{ i.attribute }}|{{ s.attribute }}",
    "{{ missing ~ 'x' }}|{{ n ~ 1 ~ t }}|{{ x ~ 'y' }}|{{ l ~ '' }}",
    "{{ 'a' + missing }}",
    "{{ 'a' + n }}",
    "{{ 'a' + 1 }}",
    "{{ [1] + [2, 3] }}|{{ 'a' + 'b' }}|{{ 1 + 2.5 }}|{{ 'ab' * 3 }}|{{ [0] * 2 }}",
    "{% for q in missing %}x{% else %}none{% endfor %}|{{ missing | length }}|{{ missing | list }}",
    "{% if missing %}x{% else %}y{% endif %}{% if not missing %}z{% endif %}{{ missing == missing2 }}",
    "{{ missing or 'default' }}|{{ n or 'd' }}|{{ missing | default('d') }}|{{ n | default('d') }}|{{ n | default('d', true) }}",
    "{{ 'x' in missing }}",
    # Tests.
    "{% for v in [s, n, t, i, x, l, d, (1, 2), missing, range(3)] %}{{ [v is string, v is none, v is boolean, v is integer, v is float, v is number, v is mapping, v is iterable, v is sequence, v is true, v is false, v is defined, v is undefined] }}\n{% endfor %}",
    "{{ 3 is odd }}|{{ 4 is even }}|{{ 9 is divisibleby 3 }}|{{ 'a' is in l }}|{{ 'A' is upper }}|{{ 'a' is lower }}|{{ 1 is eq 1 }}|{{ 2 is gt 1 }}",
    "{{ 'a' in l }}|{{ 'zz' not in l }}|{{ 'zeta' in d }}|{{ 'ell' in s }}|{{ 'role' in ms[0] }}|{{ 3 in nums }}",
    "{{ 1 == 1.0 }}|{{ t == 1 }}|{{ 'a' < 'b' }}|{{ [1, 2] == [1, 2] }}|{{ 1 != n }}|{{ n == none }}|{{ 1 < 2 < 3 }}",
    # Arithmetic.
    "{{ 7 // 2 }}|{{ -7 // 2 }}|{{ 7 % 3 }}|{{ -7 % 3 }}|{{ 7 / 2 }}|{{ 8 / 2 }}|{{ 2 ** 10 }}|{{ -neg }}|{{ neg | abs }}|{{ 10 - 2 * 3 }}",
    "{{ 1 / 0 }}",
    # Slices.
    "{{ nums[::-1] }}|{{ nums[1:] }}|{{ nums[:-1] }}|{{ nums[-1] }}|{{ nums[-2:] }}|{{ nums[10:] }}|{{ s[2:7] }}|{{ s[::-1] }}|{{ 'abcdef'[4:1:-2] }}|{{ ms[1:] | length }}",
    "{{ nums[5] }}|{{ nums[5] is defined }}|{{ 'abc'[1] }}|{{ d['Alpha'][0] }}|{{ ms[-1].content[0].text }}",
    # Loops.
    "{% for v in nums %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}/{{ loop.nextitem }};{% endfor %}",
    "{% for v in nums %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}{{ loop.changed(v > 1) }} {% endfor %}",
    "{% for m in ms %}{% if loop.previtem and loop.previtem.role != m.role %}<{{ m.role }}>{% endif %}{% if not loop.last and loop.nextitem.role != 'tool' %}|{% endif %}{% endfor %}",
    "{% for v in nums if v > 1 %}{{ v }}{{ loop.index }}{{ ',' if not loop.last }}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{{ d.keys() | list }}{{ d.values() | list }}",
    "{% for k, v in d | dictsort %}{{ k }};{% endfor %}{% for k, v in d | items %}{{ k }};{% endfor %}{{ d | dictsort(reverse=true) | map('first') | list }}",
    "{% for v in range(10) %}{% if v == 2 %}{% continue %}{% endif %}{% if v == 5 %}{% break %}{% endif %}{{ v }}{% endfor %}",
    "{% for v in range(5, 0, -2) %}{{ v }}{% endfor %}{% for v in range(2, 4) %}{{ v }}{% endfor %}{% for v in range(3, -1, -1) %}{{ v }}{% endfor %}",
    "{% for a in nums %}{% set outer = loop %}{% for b in l %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}",
    "{% for c in 'abc' %}{{ c }}-{% endfor %}",
    "{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }} {% endfor %}",
    "{% for v in i %}{% endfor %}",
    # Scopes.
    "{% set a = 1 %}{% for v in nums %}{% set a = v %}{% endfor %}{{ a }}",
    "{% set ns = namespace(a=0, b=[]) %}{% for v in nums %}{% set ns.a = ns.a + v %}{% set ns.b = ns.b + [v] %}{% endfor %}{{ ns.a }}{{ ns.b }}",
    "{% set a %}x {{ i }} y{% endset %}[{{ a }}]{% if t %}{% set b = 2 %}{% endif %}{{ b }}{% with c = 3 %}{{ c }}{% endwith %}{{ c }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    # Macros.
    "{% macro m(a, b='x', c=none) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(1, c=3) }}{{ m(b=1, a=2) }}{{ m() }}",
    "{% macro m() %} x {% endmacro %}[{{ m() }}][{{ m() | trim }}][{{ m() is string }}]",
    "{% macro outer() %}<{{ caller() }}>{% endmacro %}{% call outer() %}body{% endcall %}",
    "{% macro fact(k) %}{% if k <= 1 %}1{% else %}{{ k * (fact(k - 1) | int) }}{% endif %}{% endmacro %}{{ fact(6) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    # Whitespace.
    "a\n  {% if t %}\n  b\n  {% endif %}\nc\n",
    "a  {%- if t -%}  b  {%- endif -%}  c",
    "  {% set a = 1 %}\n  x\n{# comment #}\ny {# c #} z\n\n",
    "x\n{%+ if t %}y{% endif +%}\nz",
    "{{- ' a ' -}}  b  {{ 'c' -}}\n d\n\n",
    "a\r\n{% if t %}\r\nb{% endif %}\rc\r\n",
    "{% raw %}{{ x }}{% endraw %} {{ '{{' }} {{ '%}' }}",
    "text without end\n\n",
    "{% generation %} a {% set q = 1 %}{% endgeneration %}\n{{ q }}\n  {%- generation -%}  b  {%- endgeneration %}\nc",
    # Filters.
    "{{ s | trim }}|{{ s | upper }}|{{ s | lower }}|{{ 'hello world' | title }}|{{ 'hELLO' | capitalize }}|{{ 'xxaxx' | trim('x') }}|{{ i | trim }}",
    "{{ l | join(', ') }}|{{ nums | join }}|{{ l | sort | join }}|{{ l | sort(reverse=true) | join }}|{{ l | unique | join }}|{{ nums | sum }}|{{ nums | max }}|{{ nums | min }}|{{ l | first }}|{{ l | last }}|{{ nums | reverse | list }}|{{ l | length }}|{{ l | count }}",
    "{{ ms | selectattr('role', 'equalto', 'tool') | map(attribute='content') | join(',') }}|{{ ms | rejectattr('role', 'in', ['tool', 'user']) | list | length }}|{{ nums | select('gt', 1) | list }}|{{ l | reject('in', ['a', 'C']) | list }}|{{ l | map('upper') | list }}",
    "{{ ms | map(attribute='role') | unique | list }}|{{ ms | selectattr('tool_calls') | list | length }}|{{ ms | selectattr('tool_calls', 'defined') | list | length }}",
    "{{ ms | groupby('role') | map('first') | list }}",
    "{{ '3' | int + 1 }}|{{ 'x' | int(5) }}|{{ '2.5' | float }}|{{ 3.7 | int }}|{{ 3.14159 | round(2) }}|{{ 2.5 | round }}|{{ x | string }}|{{ big | string }}|{{ n | string }}|{{ t | string }}|{{ d | string }}",
    "{{ 'a-b-a' | replace('a', 'c') }}|{{ 'aaa' | replace('a', 'b', 2) }}|{{ 'l1\\nl2\\n\\nl3' | indent(2) }}|{{ 'l1\\nl2' | indent(2, true) }}|{{ 'l1\\nl2' | indent(width=3, first=true) }}|{{ '%s-%d' | format('a', 3) }}",
    "{{ '<a & b>' | e }}|{{ '<b>' | safe }}|{{ '<b>' | escape | length }}",
    "{{ [1, 2, 3, 4, 5] | batch(2) | list }}|{{ [1, 2, 3] | slice(2) | list }}|{{ {'a': 1} | list }}|{{ 'abc' | list }}",
    "{{ dict(a=1, b=2) }}|{{ d | length }}|{{ 'abc' | reverse }}",
    "{{ 'abc' | nosuchfilter }}",
    "{{ 'abc' is nosuchtest }}",
    "{{ nosuchfunction() }}",
    # tojson.
    "{{ d | tojson }}|{{ u | tojson }}|{{ l | tojson }}|{{ n | tojson }}|{{ t | tojson }}|{{ '<&>\\'\\\"\\\\/\\n\\t\\x01\\x7f' | tojson }}",
    "{{ d | tojson(indent=2) }}|{{ [] | tojson(indent=2) }}|{{ [[1], {}] | tojson(indent=4) }}",
    "{{ u | tojson(ensure_ascii=true) }}|{{ d | tojson(separators=(',', ':')) }}|{{ d | tojson(sort_keys=true) }}|{{ d | tojson(indent=1, separators=(' ,', ' :')) }}",
    "{{ [x, whole, big, small, 0.1, -2.5, 123456789.123, 1e22, 1e-7, 100000000000000000] | tojson }}",
    "{{ {1: 'a', true: 'b', none: 'c'} | tojson }}|{{ (1, 2) | tojson }}",
    "{{ missing | tojson }}",
    "{{ ms | tojson }}",
    # Methods.
    "{{ s.strip() }}|{{ s.lstrip() }}|{{ s.rstrip() }}|{{ 'xxabxx'.strip('x') }}|{{ '\\n\\nab\\n'.lstrip('\\n') }}|{{ '\\n\\nab\\n'.rstrip('\\n') }}|{{ 'abcba'.strip('ab') }}",
    "{{ 'a,b,c'.split(',') }}|{{ 'a b  c'.split() }}|{{ 'a b  c'.split(' ') }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b,c'.split(',')[-1] }}|{{ 'x'.split('</think>')[0] }}|{{ 'a\\nb\\r\\nc'.splitlines() }}",
    "{{ 'a,b,c'.rsplit(',') }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'bc')) }}|{{ 'abc'.find('c') }}|{{ 'abc'.find('z') }}|{{ 'abab'.count('ab') }}|{{ 'abab'.rfind('ab') }}|{{ 'ab'.removeprefix('a') }}|{{ 'ab'.removesuffix('b') }}|{{ 'ab'.removesuffix('x') }}",
    "{{ 'aBc'.upper() }}|{{ 'aBc'.lower() }}|{{ 'abc def'.title() }}|{{ 'abc'.capitalize() }}|{{ 'a-b'.replace('-', '+') }}|{{ 'aaa'.replace('a', 'b', 1) }}|{{ '-'.join(l) }}|{{ 'a{}b{}'.format(1, 'x') }}|{{ '{0}{k}'.format(1, k=2) }}",
    "{{ '12'.isdigit() }}|{{ 'ab'.isalpha() }}|{{ 'a1'.isalnum() }}|{{ ' '.isspace() }}|{{ ''.isspace() }}|{{ 'AB'.isupper() }}|{{ 'ab'.islower() }}",
    "{{ d.get('zeta') }}|{{ d.get('nope') }}|{{ d.get('nope', 3) }}|{{ ms[0].get('content') }}|{{ d['zeta'] }}|{{ d.get('nope') is none }}",
    "{{ '\\u001c\\u00a0\\u2003x\\u0085\\u001f' | trim }}|{{ '\\u001cx\\u001f'.strip() }}|{{ 'a\\u001cb\\u00a0c'.split() }}|{{ '\\u200bx\\ufeff' | trim }}",
    "{{ l.append('x') }}",
    "{{ d.update({'x': 1}) }}",
    "{{ ''.__class__ }}",
    "{{ s.nosuchmethod() }}",
    # Expressions.
    "{{ x | tojson | safe ~ 'y' }}|{{ d | tojson | safe if d is mapping or (d is sequence and d is not string) else d | string }}",
    "{{ 'a' if t else 'b' }}|{{ 'a' if f }}|{{ 'x' if missing else 'y' }}|{{ not t }}|{{ t and i }}|{{ f or n or 'z' }}|{{ (1 if t else 2) + 1 }}",
    "{{ \"dq\" ~ 'sq' ~ 'a\\\\b\\'c' ~ \"\\\"\" }}|{{ 'line1\nline2' }}|{{ 1_000 }}|{{ 0x10 }}|{{ 1e3 }}",
    "{{ {'a': {'b': [1, {'c': 2}]}}.a.b[1].c }}|{{ d['beta']['k'] }}|{{ d.beta.k }}",
    "{{ l[0] ~ l[-1] }}|{{ ms[1].tool_calls[0].function.arguments.a }}|{{ ms[1].tool_calls[0]['function']['name'] }}",
    "{{ true }}{{ True }}{{ false }}{{ False }}{{ none }}{{ None }}",
    "{{ ['a', 'b'] | join(',') if l | length > 1 else 'few' }}",
    "{{ raise_exception('Bad: ' ~ i) }}",
    "{% if ms[0].role != 'system' %}{{ raise_exception('System first, \"please\"') }}{% endif %}",
    "{{ strftime_now is defined }}",
    "{% if t %}unclosed",
    "{% set x = %}",
    "{{ 1 + }}",
    "{% unknown %}",
    "{% filter upper %}a{{ s }}{% endfilter %}",
    "{% do 1 %}",
]
env.globals["strftime_now"] = lambda format: format

cases = []
for source in templates:
    try:
        cases.append({"template": source, "text": env.from_string(source).render(**variables)})
    except Exception as error:
        cases.append({"template": source, "error": f"{type(error).__name__}: {error}"})
with open("templates.json", "w", encoding="utf-8") as file:
    json.dump({"variables": variables, "cases": cases}, file, ensure_ascii=False, indent=1)
    file.write("\n")
