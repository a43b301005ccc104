"""Words that taggers take for persons and places, and that are neither in somebody's own text.

They are needed only where evidence is thin: most famous names never stand where somebody introduces
themself. Lower case; a tag is refused when any of its words is here.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TECHNICAL = _words(
    """
    ada apache azure babel bash basic bootstrap cassandra celery chrome claude clojure cobol
    cuda dart debian delphi django docker eclipse elixir elm emacs erlang excel fedora firefox
    flask flutter fortran git github go gradle groovy hadoop haskell helm hugo java javascript
    jenkins jira julia jupyter kafka keras kotlin kubernetes latex linux lisp llama lua maple
    markdown matlab maven mongo mysql nagios nginx nim numpy oracle pandas pascal perl php
    postgres prolog puppet python pytorch rails ray react redis ruby rust sass scala scheme
    scikit selenium solidity spark spock spring sql sqlite swift tableau tcl tensorflow
    terraform tomcat travis typescript ubuntu unity vagrant vim vue windows word zig
    """
)

EPONYMS = _words(
    """
    abel ackermann ampere archimedes banach bayes bell bellman bernoulli bessel bloom bode
    boltzmann boole brown cantor carnot cartan cauchy cayley chebyshev church coulomb cramer
    curie dedekind descartes dijkstra diophantus dirac dirichlet doppler einstein erdos euclid
    euler faraday fermat feynman fibonacci ford fourier frobenius galileo galois gauss gauß
    gibbs goedel goldbach green gödel hamilton hamming hausdorff hawking heisenberg hermite hess
    hilbert hooke hubble huffman jacobi jordan kalman kelvin kepler kirchhoff knuth kolmogorov
    kruskal lagrange laplace lebesgue legendre leibniz lipschitz lorentz mandelbrot markov
    maxwell mendel mersenne minkowski moebius monte möbius nash navier newton noether ohm pareto
    pascal pasteur peano penrose planck poincare poincaré poisson prim pythagoras ramanujan
    riemann rolle schroedinger schrödinger schwarz shannon sierpinski simpson sobolev stirling
    stokes sylvester taylor tesla thales tukey turing vandermonde venn volta von-neumann
    weierstrass wilson wronski zeno
    """
)

FAMOUS = _words(
    """
    achilles alexander aristotle austen bach batman beethoven beyoncé bolivar bolívar bonaparte
    buddha caesar camões casanova cervantes chaplin chopin churchill cleopatra columbus
    confucius copernicus dali dalí dante darwin dickens disney dracula dumbledore edison
    einstein elvis frankenstein freud gandalf gandhi gates goethe groot hamlet hegel hemingway
    hercules hitler homer hugo jefferson jesus jobs kafka kant kennedy lenin leonardo lincoln
    luther machiavelli mandela marx michelangelo mohammed monet mozart musk napoleon nietzsche
    nixon obama odysseus orwell picasso plato potter puschkin pushkin raphael rembrandt romeo
    roosevelt rowling sappho schiller shakespeare sherlock socrates stalin superman swift
    tolkien tolstoy trump twain verdi vinci vivaldi voltaire wagner warhol washington watson
    wilde zeus
    """
)

NOT_NAMES = _words(
    """
    account address admin all amount anyone applicant ask author board buyer call candidate
    captain card chair class client colleague colleagues committee community concerned contact
    customer customers dad daddy damen date dear department diary director doctor dr e-mail editor
    email employee employees everyone fax fellow folks frau friend friends god grandma grandpa
    guest he hello herr herren herrn hey hi hiring how hr human humans i invoice it kids lord
    ma'am madam madame mail maman manager members miss mme mom monsieur mother mr mrs ms mum mx
    name neighbours no not number order papa parent parents partner password patient person phone
    please president prof professor reader readers recipient recruiter regards resident residents
    sales santa send senhor senhora señor señora she signor signora sincerely sir sirs sr sra
    staff student students supplier support teacher team tel tenant thank thanks that the they
    this total user username users valued visitor we what when where who why world write yes you
    your yours
    """
)

NEVER = TECHNICAL | EPONYMS | FAMOUS | NOT_NAMES

COMMON_WORDS = _words(
    """
    april art august bill bob brook carol chance chase christian crystal dawn dean drew faith
    frank gene grace grant guy harmony holly hope iris ivy jack jade jasmine joy june lance lily
    mark max may melody miles misty nick olive page pat patience paul pearl penny pierce ray
    rich rob robin rose ruby rusty sage sandy sky stone sue summer sunny victor violet wade will
    winter
    """
)
"""Names that are also words: found where somebody says them, not looked for elsewhere."""
