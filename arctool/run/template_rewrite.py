"""The rewriting of a parsed template that puts under the meter what Jinja's sandbox has no hook for.

Calls, operators and filters pass through methods of the environment; loops, comparisons, literals, slices, `~` and plain text
do not. Here each of them gets a filter of the environment around it (their names begin with an underscore): `_looped`, `_compared`,
`_made`, `_key`, `_concatenated`, `_written`. This room knows syntax trees; what the filters do is the environment's affair.
"""

from __future__ import annotations

from typing import cast

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer


def metered(tree: nodes.Template) -> nodes.Template:
    """`tree`, rewritten in place. Raises TemplateSyntaxError for statements that would run while the template compiles."""
    return cast(nodes.Template, _Metering().visit(tree))


class _Metering(NodeTransformer):
    """Children first, then the node itself. The names of the methods are Jinja's."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "_looped", node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_compared", node)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_compared", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        share = nodes.Const(len(node.nodes))
        node.nodes = [_filtered(operand, "_concatenated", node, share) for operand in node.nodes]
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made", node) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _filtered(node.key, "_key", node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        # A filter without an operand takes the text of the block; one may stand there already.
        node.filter = _filtered(node.filter, "_made", node)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if size:
            node.nodes.insert(0, _filtered(nodes.Const(size), "_written", node))
        return node

    def visit_Block(self, node: nodes.Block) -> nodes.Node:  # noqa: N802
        if node.scoped:
            raise TemplateSyntaxError("scoped blocks are not available in chat templates", node.lineno)
        return self.generic_visit(node)

    def _refused(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError(f"{type(node).__name__} is not available in chat templates", node.lineno)

    # Autoescape evaluates its option while the template compiles; the others have no file to find, and, as scoped blocks do,
    # compile into a copy of every name in sight: the square of the template's length.
    visit_ScopedEvalContextModifier = visit_Include = visit_Import = visit_FromImport = visit_Extends = _refused  # noqa: N815


def _filtered(node: nodes.Expr | None, name: str, at: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    """`node|name(args)`, at the place of `at`."""
    place = {"lineno": at.lineno, "environment": at.environment}
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, **place)
