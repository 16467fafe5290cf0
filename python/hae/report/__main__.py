from hae.report.program import program

program()
