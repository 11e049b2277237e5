"""rewards/math.py on answers of many forms. A case is `truth || right || right // wrong || wrong`, all LaTeX in a
box; ;; or a line break ends it.

The reader runs in this process: test_scorers.py has it in its sandbox.
"""

import json
import re

import pytest

from lib.run.validation import maj_at_k
from rewards import _math, geometry3k
from rewards import math as math_reward

CASE = r"""
R-r // 0 ;; \frac{R}{r} // 1 ;; \Delta // \delta ;; \Gamma // \gamma ;; F(x) // f(x) ;; ab // AB ;; Aa // aa
E // e ;; I || I // i || \sqrt{-1} ;; 2i // 2I ;; I_1 || I_{1} // I_2
\text{I and III} || \text{I, III} // \text{I and II} ;; mV // mv ;; \sin A // \sin a ;; \{A,B\} // \{a,b\}
(A,B) // (a,b) ;; A=5 // a=5 ;; f'(x) // f(x) ;; A' // A ;; \text{Even} || even ;; \text{even} || \text{Even}
Evelyn || evelyn ;; TRUE || true ;; \text{yes} // \text{no} ;; \text{(C)} || C || (C) || \text{(c)}
\text{C} || \text{(C)} ;; \text{A} || a ;; C || \text{C} ;; \text{B} // \text{C}
\text{no solution} || \text{No solution} ;; \text{(a)} || (A) ;; \Lambda+1 // \lambda+1
\mathcal{A} // \mathcal{B} ;; \vec{A} // \vec{a} ;; \angle A // \angle a ;; \log R // \log r ;; x^2+X^2 // 2x^2
G(x)=2x || 2x ;; \sqrt{R} // \sqrt{r} ;; \text{cm} || \text{CM} ;; \text{A and B} // \text{A and C}
\text{A, B} || A, B ;; A, B || B, A
"""
GROUPS_OF_DIGITS = r"""
12345 || 12{,}345 || 12,345 || 12,\!345 || \$12,345 || 12\,345 \text{ dollars} || 12\, 345
12345 || 12\text{,}345 || 12\thinspace 345 ;; 0 // 1 000 ;; 1234567 || 1{,}234{,}567
1000 || 1\;000 || 1\ 000 || 1~000 || 1\:000 || 1{\,}000 || +1 000 // (1, 000) ;; 12345.6 || 12\,345.6
-12345 || -12\,345 ;; (1,0) || (1, 000) ;; 23 // 2\,3 || 2\ 3 ;; 357 // 12\,345
(1000,2000) || (1\,000, 2\,000) ;; 1000, 2000 || 1,000, 2,000 ;; 12345\pi || 12,345\pi ;; x=12345 || x=12,345
0.12345 || 0.123\,45 ;; (1,234) // 1234 ;; \frac{1000}{3} || \frac{1\,000}{3} ;; 123 // 1,2,3 ;; 1,234 || 1234
\{1000,2000\} || \{1\,000, 2\,000\} ;; 2 // 2,300 ;; 12 // 3 4 ;; 12\,345 || 12345 ;; 1\,000\% || 1000\%
"""
EQUATIONS = r"""
12 || AB=12 || [ABC]=12 // 2x+3y=12 || xy=12 || 12=2x+3y || 3x=12 || x-y=12 || 2x+3y\le12 ;; 10 || |AB|=10
10 // x+y=10 || x+y+z=10 || a^2+b^2=10 || 10=x+y || |x|=10 || \sqrt{x}=10 || \frac{x}{2}=10 || -x=10
x=5 || 5 || 5=x // y=5 ;; 2x+3y=12 || 4x+6y=24 || 12-3y=2x || 3y+2x-12=0 // 2x+3y=13 || 12 || 2x+3y
y=2x+1 || 2x-y+1=0 ;; y=\frac{1}{2}x+3 || 2y=x+6 ;; 1,2 || x=1\text{ or }x=2 || x=1, x=2 || x=1 or x=2
x^2 || f(x)=x^2 || y=x^2
\frac{x-3}{2} || f^{-1}(x)=\frac{x-3}{2} // x^{-1}=\frac{x-3}{2} || \frac{1}{f(x)}=\frac{x-4}{2}
f(x)=x^2 || x^2 // f(x)=x^3 ;; 0 || x=0 || 0=0 // x^2-4=0 ;; x^2-4=0 || x^2=4
\frac12 || P(A)=\frac12 || \sin x=\frac12 ;; 0.3 || P(X=2)=0.3 || P(A\cap B)=0.3 ;; 30 || \angle ABC = 30^\circ
(1,2) || (x,y)=(1,2) || x=1, y=2 // x=2, y=1 ;; x=1,y=2 || (1,2) || y=2,x=1
x^2+y^2=25 || 25=x^2+y^2 || 2x^2+2y^2=50 || x^2+y^2-25=0 // x^2+y^2=5 ;; 25 // x^2+y^2=25 ;; xy=1 || y=\frac1x
y=x^2 || x^2=y || x^2 ;; x || y=x || x=x ;; A=\pi r^2 || \pi r^2 ;; \pi r^2 || A=\pi r^2 ;; 2 || x=2\text{ cm}
y=\pm\frac12x || y=\pm\frac{x}{2} ;; x>1 // 1 ;; x+y>2 || 2<x+y || 2x+2y>4 || -x-y<-2 // x+y<2
x\ne1 || x\neq1 ;; 2n+1 || a_n=2n+1 ;; y=3x || y-3x=0
x+y=10 || y=10-x || x+y-10=0 || 2x+2y=20 // x+y=-10 || x+y ;; \frac{x^2}{4}+\frac{y^2}{9}=1 || 9x^2+4y^2=36
y=\sqrt x || y=\sqrt{x} ;; x=2,y=3 || x=2 \text{ and } y=3 // x=3,y=2 ;; e^x || y=e^x ;; 8 || 2^3=8 // 2^4=8
-4 // y-x=-4 ;; 2x+3y\le12 // 12
"""
NUMBERS = r"""
1.6\times10^{-19} || 1.6e-19 || 1.6E-19 // 9.1\times10^{-31} || 0 ;; 0.0000672 || 6.72\times10^{-5} // 0.0000671
0 // 1.6\times10^{-19} || 0.0000001 || 10^{-10} ;; 10^{-20} // 2\times10^{-20} ;; 2^{-60} || \frac{1}{2^{60}} // 2^{-61}
2^{60} || 1152921504606846976 // 1152921504606846977 ;; 10^{30} // 10^{30}+1 ;; \frac13 || 0.333333 // 0.333
\pi || 3.14159265 // 3.1416 ;; 3.14159265 || 3.141593 ;; 1234567.1 // 1234567.2 ;; 0.3 || 0.30000000000000004
\frac{1000000}{3} || 333333.333 || 333333.3 // 333333 ;; \sqrt2\times10^{-9} // 1.5\times10^{-9}
(0.0000001,1) // (0.0000002,1) ;; \{0.0000001\} // \{0.0000002\} ;; [0,0.0000001] // [0,0.0000002]
\begin{pmatrix}0.0000001\\1\end{pmatrix} // \begin{pmatrix}0.0000002\\1\end{pmatrix} ;; 0.0000001x // 0.0000002x
0.00005\% // 0.00004\% ;; 12.5\% || 12.5 || \frac18 ;; \frac13\% || \frac{1}{300} ;; -0.0000671 // 0.0000671
0.1+0.2 || 0.3 ;; 0.000001 // 0.0000012 ;; \sqrt{2}+\sqrt{3} || \sqrt{5+2\sqrt{6}} ;; \cos\frac{\pi}{3} || \frac12
\frac{1}{7} || 0.142857 // 0.1428 ;; \frac{22}{7} // \pi ;; 1.6×10^{-19} || 1.6×10⁻¹⁹ ;; 0.99999999 || 1
1.6\times10^{-19}\text{ C} || 1.6\times10^{-19} // 1.7\times10^{-19}\text{ C} ;; \ln 2 || 0.693147 // 0.69
"""
BRACKETS = r"""
\{1,2\} || \{2,1\} || 1,2 || \left\{1,2\right\} || x\in\{1,2\} || x=1,2
\{1,2\} // (1,2) || [1,2] || (2,1) || \{1,2,3\} || \langle1,2\rangle
(1,2) || 1,2 || \left(1,2\right) || \bigl(1,2\bigr) || \langle1,2\rangle || \{x\mid1<x<2\} || \{(1,2)\}
(1,2) // \{1,2\} || 2,1 || (2,1) || (1,2,3) ;; (1,2] // [1,2]
[1,2] // (1,2) || (1,2] || \{1,2\} || \langle1,2\rangle ;; (1,2,3) // \{1,2,3\} || (1,3,2)
\{1,2,3\} // (1,2,3) || [1,2,3] ;; (2,1) // \{1,2\} ;; 1,2 || 2,1 || \{2,1\} || \{1,2,2\} // 1 || [1,2]
1,2,3 // 1,2 ;; (1,2),(3,4) || (3,4),(1,2) // (1,2) ;; \{(1,2),(3,4)\} || \{(3,4),(1,2)\}
\begin{pmatrix}1\\2\end{pmatrix} || \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} // \begin{pmatrix}2\\1\end{pmatrix} || \begin{pmatrix}1&2\end{pmatrix} || \{1,2\}
[0,\infty) // (0,\infty) ;; (-\infty,1)\cup(2,\infty) || (2,\infty)\cup(-\infty,1) || x<1\text{ or }x>2
(-\infty,1)\cup(2,\infty) // (-\infty,1]\cup[2,\infty) || x\le1\text{ or }x>2 ;; \{5\} || 5
\{0\} // \emptyset ;; (a,b) // [a,b] || (b,a) ;; (3,\frac\pi2) // \{3,\frac\pi2\} ;; [-1,1] || -1\le x\le1
-1\le x\le1 || [-1,1] ;; (-1,1) // -1\le x\le1 ;; 1<x<2 || 2>x>1 || x\in(1,2) ;; x\ge1 || [1,\infty)
\{-1,1\} || \pm1 ;; x\in(1,2) || 1<x<2 ;; (1,\infty) || \{x : x>1\}
x<1\text{ or }x>2 || (-\infty,1)\cup(2,\infty) || x>2\text{ or }x<1
\mathbb{R}\setminus\{1\} || (-\infty,1)\cup(1,\infty) ;; (-\infty,1)\cup(1,\infty) || x\ne1
\{(1,2)\} || (1,2) ;; \{1\} || (1) ;; \{1,2\}\cup\{3\} || \{1,2,3\}
\left\{\frac12,\frac13\right\} // \left(\frac12,\frac13\right)
\begin{bmatrix}1&2\\3&4\end{bmatrix} || \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
\begin{bmatrix}1&2\\3&4\end{bmatrix} // \begin{bmatrix}1&3\\2&4\end{bmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} || -2 ;; \{\} // \{0\} ;; (1,2)\cup(3,4) || (3,4)\cup(1,2) // \{1,2,3,4\}
[2,\infty) || x\geq2 || 2\leq x // x>2 ;; \left[0,\frac{\pi}{2}\right] || [0,\pi/2]
"""
FORMS = r"""
-3 || −3 || -3. ;; -5 || –5 || \text{−5} ;; (1,2) || (1, 2). ;; (−1,2) || (-1,2)
\frac13 || 0.\overline{3} || 0.333\ldots || 0.333... || 0.(3) || 0.\dot{3} || 0.\bar{3}
\frac{1}{3} // 0.\overline{34} ;; \frac16 || 0.1\overline{6} ;; \frac{1}{6} || 0.1666\ldots
0.\overline{3} || \frac13 ;; \frac{4}{33} || 0.\overline{12} ;; 3\frac{1}{3} || 3.\overline{3}
-\frac13 || -0.\overline{3} ;; 33.\overline{3}\% || \frac13
\frac{1\pm\sqrt5}{4} || \frac{1+\sqrt5}{4}, \frac{1-\sqrt5}{4} || \frac{1-\sqrt5}{4}, \frac{1+\sqrt5}{4}
\frac{1\pm\sqrt5}{4} || \frac{1+\sqrt5}{4}\text{ and }\frac{1-\sqrt5}{4} // \frac{1+\sqrt5}{4}
\frac{1+\sqrt5}{4}, \frac{1-\sqrt5}{4} || \frac{1\pm\sqrt5}{4} ;; \pm 2 || 2,-2 ;; 2,-2 || \pm2 || x=\pm2
x=\pm2 || 2,-2 ;; \pm1,\pm2 || 1,-1,2,-2 ;; \{\pm1,\pm2\} || \{1,-1,2,-2\} ;; \pm2 // 2 ;; 2\pm3i || 2-3i,2+3i
3\pm2\sqrt2 || 3+2\sqrt2 \text{ or } 3-2\sqrt2 // 3+2\sqrt2 ;; x=3\pm\sqrt2 || 3\pm\sqrt2 ;; a\mp b || a-b,a+b
2.5 || 2 1/2 || 2\frac12 || 2\,\frac{1}{2} || 2\ 1/2 || 2\tfrac12 || 2½ ;; -2.5 || -2\frac12
0.75 || 3/4 // 1 3/4 ;; 0.5 || ½ || .5 || \frac{1}{2}. ;; -0.5 || -.5
-\frac{1}{2} || \frac{-1}{2} || \frac{1}{-2}
\frac12 || \frac{1}{2} || 1/2 || \dfrac12 || \nicefrac{1}{2} || {1\over 2} || 2^{-1} || 50\%
90 || 90^\circ || 90^{\circ} || 90° || 90 \text{ degrees} || 90\degree ;; 90^\circ || 90 || 90\text{ degrees}
\$5 || 5 ;; 5\% || 5 ;; 5\text{ cm}^2 || 5 ;; 15\mbox{ cm}^2 || 15 ;; x\in[1,2] || [1,2] ;; [1,2] || x \in [1,2]
\infty || ∞ || +\infty ;; -\infty // \infty ;; \emptyset || \varnothing || \{\} || ∅
\{\} || \{\,\} // \{\emptyset\} ;; \mathbb{R} || (-\infty,\infty) || \mathbb R || ℝ || (-\infty,+\infty) // R
\mathbb{Z} // \mathbb{R} ;; x=-3 || −3 ;; 2\sqrt{3} || \sqrt{12} ;; 5\times10^3 || 5×10^3 ;; (x+1)^2 || x^2+2x+1
\frac{x+1}{2} || 0.5x+0.5 ;; 3-2i // 3+2i ;; \binom52 || 10 ;; 3:4 || \frac34 ;; 2t // 2 ;; x+2c // x+2
\frac\pi2 || \pi/2 ;; 2x+3 || y=2x+3 ;; 2 || 2t // 2\text{ hours }30\text{ minutes} ;; \text{2 hours} || 2
5 m || 5 ;; 6 \text{ and } 7 || 6,7 ;; 5 || 5 m || 5\text{ m} // 2+3t || 2 + 3 m ;; -5 || -5 m
10 || 10\text{ cm/s} || 10 dollars || 10\text{ dollars} ;; \text{June 20} || June 20
1\frac{3}{5}\text{ mL} || 1.6 ;; 3, 5, 7 || 7, 5, 3 ;; \frac{270}7\text{ degrees} || \frac{270}{7}
\left( 3, \frac{\pi}{2} \right) || (3,\pi/2) ;; \Big(\frac34,1\Big) || (0.75,1) ;; \mathbf{(1,2)} || (1,2)
\begin{pmatrix} 1/5 & -2/5 \\ -2/5 & 4/5 \end{pmatrix} || \begin{pmatrix}0.2&-0.4\\-0.4&0.8\end{pmatrix}
11,\! 111,\! 111,\! 100 || 11111111100 ;; \frac{2\pi}{3} // 120^\circ ;; 3\sqrt2 || 3*sqrt(2)
2\pi || 2*pi || 2pi ;; x^2 || x**2 || x² ;; \sqrt{3} || 3^{1/2} || 3^{0.5} ;; [0,\infty) || [0,+∞)
\displaystyle\frac{3}{4} || \frac34
x=\frac{-b\pm\sqrt{b^2-4ac}}{2a} || \frac{-b+\sqrt{b^2-4ac}}{2a},\frac{-b-\sqrt{b^2-4ac}}{2a}
\{-2, 3\} || x=-2\text{ or }x=3 || -2\text{ and }3 ;; \sqrt{−x} || \sqrt{-x} ;; x\in\mathbb{R} || \mathbb{R}
2i || (1+i)^2 || \sqrt{-4} || 2\cdot i // 2 || -2i ;; i || \sqrt{-1} // -1 ;; 5 || |3+4i| // |3+5i|
e^{i\pi/2} || i // -i ;; n(n+1)/2 || \frac{n^2+n}{2} || \sum_{i=1}^n i = \frac{n(n+1)}{2}
4210_5 || 4210_{5} || 4210_{5}. || 4210 // 4210_{7} || 4211_5 ;; 2^{2004} || 4^{1002} // 2^{2004}-1 || 2^{2005}
1 // 1-\frac{1}{2^{2004}} ;; AB\perp CD || AB \perp CD. || $AB\perp CD$ // AB\perp CE
\frac{k\pi}{2}, k\in\mathbb{Z} || \dfrac{k\pi}2,k\in\mathbb{Z} // \frac{k\pi}{3}, k\in\mathbb{Z}
"""
KINDS = {"case": CASE, "digits": GROUPS_OF_DIGITS, "equation": EQUATIONS}
KINDS |= {"number": NUMBERS, "bracket": BRACKETS, "form": FORMS}


@pytest.fixture(autouse=True)
def no_sandbox(monkeypatch):
    monkeypatch.setattr(math_reward, "evaluate", lambda _, text, *__: json.loads(json.dumps(_math.read(text))))


@pytest.mark.parametrize("kind", KINDS)
def test_answers(kind):
    for case in re.split(" ;; |\n", KINDS[kind].strip("\n")):
        rights, _, wrongs = case.partition(" // ")
        truth, *rights = rights.split(" || ")
        wrongs = wrongs.split(" || ") if wrongs else []
        assert rights or wrongs
        for answer in (*rights, *wrongs):
            result = math_reward.compute_score("", f"\\boxed{{{answer}}}", truth)
            assert result["score"] == float(answer in rights), (truth, answer, result["pred"])


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("The answer is 2 1/2", "2.5", True),
        ("The answer is 2 1/4", "1", False),
        ("It is 12 345", "12345", True),
        (r"It is 12\,345.", "12345", True),
        ("It is $r$", "R", False),
        ("Thus $x+y=10$", "10", False),
        (r"It is $9.1\times10^{-31}$", r"1.6\times10^{-19}", False),
        (r"It is $(1,2)$", r"\{1,2\}", False),
        (r"They are $\frac{1\pm\sqrt5}{4}$", r"\frac{1-\sqrt5}{4}, \frac{1+\sqrt5}{4}", True),
        ("It is 50%", r"50\%", True),
        ("It is 50 percent", r"\frac12", True),
        ("It is 2π.", "2", False),
        ("It is 2x", "2", False),
        ("As 2x = 4, it is 2.", "2", True),
        ("It is 2cm", "2", True),
    ],
)
def test_responses_without_a_box(response, truth, right):
    assert math_reward.compute_score("", response, truth)["score"] == float(right)


VOTES = [  # truth, equal right answers, equal wrong answers, another wrong one
    (r"\frac12", ["0.5", "½", "1/2"], ["3", "3.0"], "4"),
    ("3", ["3", "x=3"], ["0.5", r"\frac12", ".5"], "0.25"),
    ("5", ["5", "5."], [r"2\sqrt2", r"\sqrt8"], r"\sqrt7"),
    ("x+1", ["x+1", "1+x"], ["x+2", "2 + x"], "x"),
    ("5", ["5"], [r"10\%", r"10 \%"], r"11\%"),
    ("5", ["x=5"], ["3", "x=3", "3=y"], "x=4"),
    ("5", ["5"], [r"x\ge3", r"[3,\infty)", r"3\le x"], "x>3"),
    (r"\text{No}", ["no", "No"], ["Yes", r"\text{yes}", "yes."], r"\text{maybe}"),
    ("(1,2)", ["(1,2)"], ["(0.5,1)", r"(\frac12, 1)"], "[0.5,1]"),
]


@pytest.mark.parametrize(("truth", "rights", "wrongs", "other"), VOTES)
@pytest.mark.parametrize("scorer", [math_reward, geometry3k])
def test_equal_answers_are_one_vote(scorer, truth, rights, wrongs, other):
    results = [scorer.compute_score("", f"\\boxed{{{answer}}}", truth) for answer in (*rights, *wrongs, other)]
    right, wrong, last = results[: len(rights)], results[len(rights) : -1], results[-1]
    assert {result["pred"] for result in right} == {truth}
    assert len({result["pred"] for result in wrong}) == 1
    assert last["pred"] not in (right[0]["pred"], wrong[0]["pred"])
    lead = [float(len(rights) > len(wrongs))] if len(rights) != len(wrongs) else [0.5]
    assert maj_at_k([x["pred"] for x in results], [float(x["score"] > 0.5) for x in results], len(results)) in lead


def test_a_hostile_answer_ends_in_time(monkeypatch):
    monkeypatch.setattr(_math, "SECONDS", 1)
    for answer in ("9^{9^{9^{9}}}", "(10^9)!"):
        assert math_reward.compute_score("", f"\\boxed{{{answer}}}", "5")["score"] == 0.0
