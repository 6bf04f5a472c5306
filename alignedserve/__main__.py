from alignedserve.cli import main

main()
