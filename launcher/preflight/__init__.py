"""What can be known of a run before it has machines: the compiled train step, its memory and its cost.

`hlo` reads the compiler's text, `loops` counts trips, `schedule` walks what is executed, `flops`,
`collectives` and `compiled` say what it amounts to. Pure and standard library only.
"""
